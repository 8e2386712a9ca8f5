"""The chain: variants of states by brute force, folds, statistics by hand, and a run that is killed."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.chain.arms import VARIANTS
from experiments.chain.folds import choose, make_folds
from forked import Forked

from experiments.chain.config import ChainConfig
from experiments.chain.report import Comparison, outcome
from experiments.chain.run import chain
from experiments.chain.variants import with_variant
from remind.build.config import BuildStatesConfig
from remind.core.errors import ConfigError, DataError
from remind.core.files import read_json
from remind.data.readers import read
from remind.data.sample import sample_path
from remind.states.pyramid import AttentionalState, FactualState, ReflectiveState, Strategy, line_of, segments_of
from remind.states.records import StateRecord, blocks_of, record_of, record_of_row, row_of, summary_of
from remind.testbed.ladder import mark_blocks
from remind.train_pra.config import TrainerConfig
from sae import TopKSAE, layer_folder

CORPUS = read(sample_path() / "train.jsonl")
SOURCES = {question.id: (CORPUS.dialogue(question.dialogue_id), question) for question in CORPUS.questions}


class Lister:
    """An auxiliary LLM whose summary lists the marked turns."""

    name = "lister"
    failures = ()

    def summaries(self, states: Sequence[AttentionalState]) -> list[str]:
        return [
            "marked\n" + "\n".join(s.factual.turns[n].id for a, b in s.blocks for n in range(a, b + 1)) for s in states
        ]


def made(index: int) -> StateRecord:
    """Some turns of the dialogue, every other of the gold ones among them, a few of them marked."""
    question = CORPUS.questions[index]
    dialogue, rng = CORPUS.dialogue(question.dialogue_id), random.Random(index)
    gold = {dialogue.positions[turn] for turn in question.evidence[::2]}
    positions = sorted(gold | set(rng.sample(range(len(dialogue.turns)), 12)))
    state = FactualState(dialogue, question, segments_of(dialogue, positions), Strategy(("look",)))
    blocks = mark_blocks(state, {turn.id for turn in rng.sample(state.turns, 4)})
    return record_of(
        ReflectiveState(AttentionalState(state, blocks), f"summary of {question.id}\nof two lines"), "test"
    )


RECORDS = [made(index) for index in range(0, len(CORPUS.questions), 3)]


def marked(record: StateRecord) -> list[str]:
    """Turns whose text stands after an odd number of marker lines."""
    text, found = record.x1.text, []
    for turn in record.x1.turns:
        if text[: turn.start].split("\n\nConversation\n")[1].split("\n").count("[ATTENTION]") % 2:
            found.append(turn.turn_id)
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_by_brute_force(name: str) -> None:
    own = {record.question_id: f"summary of {record.question_id}\nof two lines" for record in RECORDS}
    moved = 0
    for before, after in zip(RECORDS, with_variant(name, RECORDS, SOURCES, Lister(), 3), strict=True):  # type: ignore[arg-type]
        assert record_of_row(row_of(after)) == after
        assert after.x0 == before.x0
        assert after.target == before.target
        dialogue, question = SOURCES[after.question_id]
        shown = [turn.turn_id for turn in after.x0.turns]
        gold = [turn for turn in shown if turn in question.evidence or
                {i.index for i in dialogue.turn(turn).images} & set(question.images)]  # fmt: skip
        expected = {"gold": gold, "none": [], "built": marked(before), "other": marked(before)}.get(name, marked(after))
        assert marked(after) == expected
        assert len(marked(after)) == len(expected if name in ("gold", "none") else marked(before))
        moved += marked(after) != marked(before)
        summary = summary_of(after)
        if name in ("other", "null"):
            assert summary in own.values()
            assert summary != own[after.question_id]
        elif name == "gold":
            assert summary == ("\n".join(["Key lines:", *(line_of(dialogue.turn(t)) for t in gold)]) if gold else "")
        else:
            lists = {"random": marked(after), "none": shown}
            assert summary == ("marked\n" + "\n".join(lists[name]) if name in lists else own[after.question_id])
    assert (moved > len(RECORDS) // 2) == (name in ("gold", "random", "none", "null"))


def test_variants_that_cannot_be_made() -> None:
    with pytest.raises(ConfigError, match="no other one"):
        with_variant("other", RECORDS[:1], SOURCES, Lister())  # type: ignore[arg-type]
    changed = replace(RECORDS[0].x2, text=RECORDS[0].x2.text.replace("Reflection", "Thoughts"))
    with pytest.raises(DataError, match="not x1 with a summary"):
        summary_of(replace(RECORDS[0], x2=changed))
    assert blocks_of(with_variant("none", RECORDS[:1], SOURCES, Lister())[0].x1) == ()  # type: ignore[arg-type]


@pytest.mark.parametrize("pool", ["others", "same"])
def test_folds_share_no_dialogue(pool: str) -> None:
    cfg = ChainConfig("o", BuildStatesConfig(["a"], ""), pool=pool, labelled=0.5)  # type: ignore[arg-type]
    inputs = {"a": [f"a{n}" for n in range(6)], "b": [f"b{n}" for n in range(7)]}
    folds = make_folds(inputs, cfg)
    tested = sorted(name for fold in folds for name in fold.test)
    assert tested == sorted([*inputs["a"], *inputs["b"]])
    for fold in folds:
        parts = [fold.test, fold.dev, fold.labelled, *([fold.pool] if pool == "others" else [])]
        names = [name for part in parts for name in part]
        assert len(names) == len(set(names))
        assert (len(names) == 13) == (pool == "others")
        assert all({name[0] for name in part} == {"a", "b"} for part in parts)
        assert pool == "others" or fold.pool == fold.labelled
    assert make_folds({name: ids[::-1] for name, ids in inputs.items()}, cfg) == folds
    assert make_folds(inputs, replace(cfg, fold_seed=1)) != folds
    with pytest.raises(ConfigError, match="too few"):
        make_folds({"a": ["1", "2", "3"][: 3 if pool == "others" else 2]}, cfg)


def test_questions_are_spread_over_their_dialogue() -> None:
    records = [replace(RECORDS[0], question_id=f"q{n}", dialogue_id="d", category=str(n % 3)) for n in range(12)]
    records[4] = replace(records[4], target=None)
    assert [r.question_id for r in choose(records, ["d", "e"], 3, ("0", "1"))] == ["q0", "q3", "q7"]
    assert len(choose(records, ["d"], None, None)) == 11


def _rows(arm: str, seed: int | None, scores: dict[str, float | None]) -> list[dict[str, Any]]:
    about = {"arm": arm, "variant": "built", "level": "x0", "cap": None, "seed": seed}
    return [{**about, "question_id": q, "dialogue_id": q[0], "score": value} for q, value in scores.items()]


def test_differences_are_paired_by_question_and_seed() -> None:
    rows = [
        *_rows("untrained", None, {"a1": 0.1, "a2": 0.2, "b1": 0.3, "b2": 0.9}),
        *_rows("sft", 1, {"a1": 0.4, "a2": 0.5, "b1": 0.6, "b2": None}),
        *_rows("sft", 2, {"a1": 0.6, "a2": 0.7, "b1": 0.8, "b2": 1.0}),
        *_rows("pra", 1, {"a1": 0.5, "a2": 0.5, "b1": 0.9}),
        *_rows("pra", 3, {"a1": 0.0, "a2": 0.0, "b1": 0.0}),
    ]
    answers = Comparison(rows, 200)
    untrained, sft, pra = ((arm, "built", "x0", None) for arm in ("untrained", "sft", "pra"))
    gain = answers.mean(sft, less=untrained)
    # of a1, a2, b1: .3 with the first seed, .5 with the second
    assert gain is not None
    assert (gain["value"], gain["n"]) == (pytest.approx(0.4), 6)
    both = answers.mean(pra, less=sft)
    # seed 1 alone: .1, 0, .3
    assert both is not None
    assert (both["value"], both["n"]) == (pytest.approx(0.4 / 3), 3)
    assert both["low"] < both["value"] < both["high"]
    # every dialogue and seed gains the same: nothing is uncertain
    same = Comparison([*rows[:4], *_rows("sft", 1, {"a1": 0.2, "a2": 0.3, "b1": 0.4, "b2": 1.0})], 200)
    sure = same.mean(sft, less=untrained)
    assert sure is not None
    assert sure["low"] == pytest.approx(0.1) == sure["high"]
    assert answers.mean(sft, which=lambda row: row["dialogue_id"] == "c") is None


def test_an_outcome_counts_exact_quotes_of_what_was_shown() -> None:
    record = next(record for record in RECORDS if len(record.evidence_found) > 1 and not record.visual)
    lines = dict(zip(record.evidence, record.evidence_lines, strict=True))
    held = {lines[turn] for turn in record.evidence_found}
    said = [next(iter(sorted(held))), "Nobody: said so"]
    row: dict[str, Any] = {"evidence": said, "evidence_shown": list(record.evidence_found), "failure": None}
    found = outcome({**row, "accuracy": 0.0, "problems": ["no answer tag"]}, record)
    # no option was named: wrong, not left out
    assert (found["quoted"], found["score"], found["malformed"]) == (1 / len(held), 0.0, True)
    assert outcome({**row, "failure": "server"}, record)["score"] is None
    assert outcome({**row, "f1": 0.3, "locomo_f1": 0.7, "accuracy": 1.0}, record)["score"] == 0.7
    assert not any(isinstance(value, str) and value in record.x0.text for name, value in found.items()
                   if name not in ("question_id", "dialogue_id", "category"))  # fmt: skip


# the whole command

_SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_chain import small
from experiments.chain.run import chain
if __name__ == "__main__":
    chain(small(Path(sys.argv[2]), Path(sys.argv[3])))
"""


def small(folder: Path, out: Path, **values: Any) -> ChainConfig:
    build = BuildStatesConfig(
        [str(folder / "talk.jsonl")], "", sae=str(folder / "sae"), cache=str(folder / "cache"), limit=2
    )
    build.perception.retrieve.max_context_tokens = 60
    given: dict[str, Any] = {
        "arms": ("untrained", "sft_x2", "pra", "pra_on_policy", "pra_null"),
        "probes": ("other",),
        "contexts": (30,),
        "folds": 3,
        "only_folds": (0,),
        "sft_steps": 2,
        "pra_steps": 4,
        "sft_lr": 1e-3,
        "pra_lr": 1e-3,
        "trace_every": 2,
        "max_new_tokens": 8,
        "resamples": 100,
        "trainer": TrainerConfig(save_steps=1),
    }
    return ChainConfig(str(out), build, "nano", **{**given, **values})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five dialogues of the sample, and an untrained SAE."""
    folder = tmp_path_factory.mktemp("chain")
    rows = [json.loads(line) for line in (sample_path() / "train.jsonl").read_text().splitlines()]
    names = [row["id"] for row in rows if row["type"] == "context"][:5]
    kept = [row for row in rows if row.get("context_id", row["id"]) in names]
    (folder / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    TopKSAE(384, 512, 8, generator=torch.Generator().manual_seed(0)).save(layer_folder(folder / "sae", 5))
    return folder


def _killed(script: Path, folder: Path, out: Path) -> None:
    script.write_text(_SCRIPT)
    process = Forked(script, Path(__file__).parent, folder, out)
    training = out / "fold-0" / "seed-1" / "pra" / "train"
    while not list(training.glob("checkpoint-[23]")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL


@pytest.mark.slow
def test_a_small_chain_that_is_killed_ends_like_one_that_is_not(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _killed(tmp_path / "script.py", folder, out)
    assert not (out / "fold-0" / "seed-1" / "pra" / "answers").exists()
    trained = {path: path.stat().st_mtime_ns for path in out.glob("fold-0/*/sft/model/*")}
    chain(small(folder, out))
    assert trained == {path: path.stat().st_mtime_ns for path in trained}
    rows = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    chain(small(folder, tmp_path / "whole", arms=("pra",), contexts=(), probes=()))
    whole = [json.loads(line) for line in (tmp_path / "whole" / "runs.jsonl").read_text().splitlines()]
    asked_of_both = [row for row in rows if row["arm"] in ("sft", "pra") and row["level"] in ("x0", "oracle")]
    assert [row for row in asked_of_both if row["cap"] is None] == whole

    asked = {(row["arm"], row["variant"], row["level"]) for row in rows}
    probes = {("built", "x0"), ("built", "oracle"), ("other", "x2")}
    assert asked == {(arm, *probe) for arm in ("untrained", "sft") for probe in probes} | {
        (arm, "built", "x0") for arm in ("sft_x2", "pra", "pra_on_policy", "pra_null")
    }
    assert {row["arm"] for row in rows if row["cap"] == 30} == {"sft", "pra"}
    result = read_json(out / "result.json")
    shorter, longer = (tokens for tokens, _ in result["contexts"]["pra"])
    assert shorter < longer
    assert [step for step, _ in result["traces"]["pra"]] == [2, 4, 6]
    assert set(result["arms"]["pra"]["against"]) == {"sft", "pra_null"}
    likely = result["arms"]["pra"]["log_probability"], result["arms"]["pra"]["against"]["sft"]["log_probability"]
    assert likely[0]["value"] < 0 < likely[0]["n"] == likely[1]["n"]
    assert "PRA without labels" in (out / "table.md").read_text()
    assert all((out / name).stat().st_size > 5000 for name in ("steps.png", "contexts.png"))
    # only what others start from is kept
    assert [path.parent.name for path in out.glob("fold-0/*/*/model")] == ["sft"]
    with pytest.raises(ConfigError, match=r"other settings \(pra_steps\)"):
        chain(small(folder, out, pra_steps=5))
