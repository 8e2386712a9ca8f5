"""The chain: variants of states by brute force, folds, statistics by hand, and a run that is killed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.chain.chooser import Chooser
from experiments.chain.config import VARIANTS, ChainConfig
from experiments.chain.report import Comparison
from experiments.chain.run import chain, make_folds
from experiments.chain.variants import with_variant, with_x0
from remind.build.config import BuildStatesConfig
from remind.core.errors import ConfigError
from remind.core.files import read_json
from remind.data.readers import read
from remind.data.sample import sample_path
from remind.states.dataset import read_states
from remind.states.pyramid import (
    AttentionalState,
    FactualState,
    ReflectiveState,
    Strategy,
    line_of,
    segments_of,
    turn_lines,
)
from remind.states.records import StateRecord, record_of, summary_of
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


class Scripted(Chooser):
    """Names lines in no order, one of them twice, one that is none, and more than may be chosen."""

    def __init__(self) -> None:
        pass

    def _ask(self, prompts: Sequence[str], room: int) -> list[str]:
        ways = [re.findall(r"^(?:\d+\. )?\S+: ", prompt, re.MULTILINE) for prompt in prompts]
        return [
            "3, 2 and 99, 3, 1: 5, 6." if "numbered" in p else f"said of {len(w) - 1} lines"
            for p, w in zip(prompts, ways, strict=True)
        ]


def made(index: int) -> StateRecord:
    """Some turns of the dialogue, every other of the gold ones among them, a few of them marked."""
    question = CORPUS.questions[index]
    dialogue, rng = CORPUS.dialogue(question.dialogue_id), random.Random(index)
    gold = {dialogue.positions[turn] for turn in question.evidence[::2]}
    positions = sorted(gold | set(rng.sample(range(len(dialogue.turns)), 12)))
    state = FactualState(dialogue, question, segments_of(dialogue, positions), Strategy(("look",)))
    blocks = mark_blocks(state, {turn.id for turn in rng.sample(state.turns, 4)})
    salience = tuple(rng.random() for _ in state.turns)
    marked = AttentionalState(state, blocks, salience)
    return record_of(ReflectiveState(marked, f"summary of {question.id}\nof two lines"), "test")


RECORDS = [made(index) for index in range(0, len(CORPUS.questions), 3)]


def marked(record: StateRecord) -> list[str]:
    """Turns whose text stands after an odd number of marker lines."""
    text, found = record.x1.text, []
    for turn in record.x1.turns:
        if text[: turn.start].split("\n\nConversation\n")[1].split("\n").count("[ATTENTION]") % 2:
            found.append(turn.turn_id)
    return found


def gold_of(record: StateRecord) -> list[str]:
    """Turns of x0 that are gold evidence, or hold a gold image."""
    dialogue, question = SOURCES[record.question_id]
    shown = [turn.turn_id for turn in record.x0.turns]
    images = {t: {image.index for image in dialogue.turn(t).images} for t in shown}
    return [t for t in shown if t in question.evidence or images[t] & set(question.images)]


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_by_brute_force(name: str) -> None:
    def of(name: str) -> list[StateRecord]:
        return with_variant(name, RECORDS, SOURCES, Lister(), Scripted())  # type: ignore[arg-type]

    # checked by themselves
    quotes = {one.question_id: summary_of(one) for one in of(name.removesuffix("_other"))} if "_" in name else {}
    for before, after in zip(RECORDS, of(name), strict=True):
        assert (after.x0, after.target) == (before.x0, before.target)
        shown = [turn.turn_id for turn in after.x0.turns]
        turns = {r.question_id: [SOURCES[r.question_id][0].turn(t) for t in gold_of(r)] for r in RECORDS}
        salience = dict(zip(shown, before.salience, strict=True))
        same = {"built": marked(before), "other": marked(before), "gold": gold_of(after)}
        assert marked(after) == same.get(name, [])
        own, summary = f"summary of {after.question_id}\nof two lines", summary_of(after)
        if name == "other":
            assert summary.startswith("summary of") and summary != own  # noqa: PT018
        elif name.endswith("_other"):
            assert summary in [quoted for question, quoted in quotes.items() if question != after.question_id]
        elif name in ("chosen", "told"):
            kept = [turn_lines(SOURCES[after.question_id][0].turn(shown[place])) for place in (0, 1, 2, 4)]
            said = ["said of 4 lines"] if name == "told" else []
            assert summary == "\n".join(["Key lines:", *kept, *said])
        elif name.startswith("top"):
            best = sorted(before.x1.turns, key=lambda turn: -salience[turn.turn_id])[: int(name[3:])]
            kept = [turn.turn_id for turn in after.x0.turns if turn.turn_id in {one.turn_id for one in best}]
            dialogue = SOURCES[after.question_id][0]
            assert summary == "\n".join(["Key lines:", *(turn_lines(dialogue.turn(one)) for one in kept)])
        elif name == "said":
            assert re.findall(r'(\S+ said: ".*?")(?: |$)', summary) == [
                '{} said: "{}"'.format(*line_of(turn).split(": ", 1)) for turn in turns[after.question_id]
            ]
        elif name in ("gold", "quoted"):
            quoted = list(map(turn_lines, turns[after.question_id]))
            assert summary == ("\n".join(["Key lines:", *quoted]) if quoted else "")
        else:
            assert summary == ("marked\n" + "\n".join(shown) if name == "none" else own)


@pytest.mark.parametrize("held", ["all", "none"])
def test_x0_holds_all_of_the_evidence_or_none_in_ten_turns(held: str) -> None:
    for record in with_x0(held, 10, RECORDS, SOURCES, 0):
        before, question = (
            next(r for r in RECORDS if r.question_id == record.question_id),
            SOURCES[record.question_id][1],
        )
        shown = [turn.turn_id for turn in record.x0.turns]
        beside = {turn.turn_id for turn in before.x0.turns} - set(question.evidence)
        assert set(shown) & set(question.evidence) == (set(question.evidence) if held == "all" else set())
        assert set(shown) - set(question.evidence) <= beside
        assert len(shown) == min(10, len(beside) + (len(question.evidence) if held == "all" else 0))


@pytest.mark.parametrize("pool", ["others", "same"])
def test_folds_share_no_dialogue(pool: str) -> None:
    cfg = ChainConfig("o", BuildStatesConfig(["a"], ""), pool=pool, labelled=0.5)  # type: ignore[arg-type]
    inputs = {"a": [f"a{n}" for n in range(6)], "b": [f"b{n}" for n in range(7)]}
    folds = make_folds(inputs, cfg)
    assert sorted(name for fold in folds for name in fold.test) == [*inputs["a"], *inputs["b"]]
    for fold in folds:
        parts = [fold.test, fold.dev, fold.labelled, *([fold.pool] if pool == "others" else [])]
        names = [name for part in parts for name in part]
        assert len(names) == len(set(names))
        assert (len(names) == 13) == (pool == "others")
        assert all({name[0] for name in part} == {"a", "b"} for part in parts)
        assert pool == "others" or fold.pool == fold.labelled
    with pytest.raises(ConfigError, match="too few"):
        make_folds({"a": ["1", "2"]}, cfg)


# the whole command


def test_a_seed_of_one_fold_alone_takes_none_away() -> None:
    rows = [
        {"arm": arm, "variant": "built", "level": "x0", "seed": seed, "question_id": f"q{n}", "dialogue_id": f"d{n}",
         "score": float(arm == "sft" and n < 2)}
        for arm, seed, questions in (("untrained", None, 4), ("sft", 1, 4), ("sft", 2, 2))
        for n in range(questions)
    ]  # fmt: skip
    untrained, sft = (("untrained", "built", "x0"), ("sft", "built", "x0"))
    found = Comparison(rows, 20)
    assert (found.mean(sft)["value"], found.mean(sft, less=untrained)["value"]) == (0.5, 0.5)  # type: ignore[index]
    whole = [{**row, "question_id": f"q{n}"} for row in rows if row["seed"] == 2 for n in range(4)]
    assert Comparison([*rows, *whole], 20).mean(sft)["value"] == 0.75  # type: ignore[index]


def small(folder: Path, out: Path, **values: Any) -> ChainConfig:
    cache, data = str(folder / "cache"), [str(folder / "talk.jsonl")]
    build = BuildStatesConfig(data, "", sae=str(folder / "sae"), cache=cache, limit=2)
    build.perception.retrieve.max_context_tokens = 60
    given: dict[str, Any] = {"arms": ("untrained", "sft_x2", "pra", "pra_on_policy", "pra_other"), "probes": ("other",)}
    given |= {"folds": 3, "only_folds": (0,), "sft_steps": 1, "pra_steps": 3, "sft_lr": 1e-3, "pra_lr": 1e-3}
    given |= {"trace_every": 1, "max_new_tokens": 4, "resamples": 100, "trainer": TrainerConfig(save_steps=1)}
    return ChainConfig(str(out), build, "nano", **{**given, **values})


@pytest.mark.slow
def test_a_small_chain_that_is_killed_ends_like_one_that_is_not(tmp_path: Path, kill: Any) -> None:
    """On five dialogues of the sample, with an untrained SAE."""
    folder, out = tmp_path, tmp_path / "out"
    rows = [json.loads(line) for line in (sample_path() / "train.jsonl").read_text().splitlines()]
    names = [row["id"] for row in rows if row["type"] == "context"][:5]
    kept = [row for row in rows if row.get("context_id", row["id"]) in names]
    (folder / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    TopKSAE(384, 512, 8, generator=torch.Generator().manual_seed(0)).save(layer_folder(folder / "sae", 5))

    line = f"from test_chain import Path, chain, small; chain(small(Path({str(folder)!r}), Path({str(out)!r})))"
    kill(line, lambda: list(out.glob("fold-0/seed-1/pra/train/checkpoint-[12]")))
    assert not (out / "fold-0" / "seed-1" / "pra" / "answers").exists()
    chain(small(folder, out))
    rows = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    chain(small(folder, tmp_path / "whole", arms=("pra",), probe_answers=False))
    whole = [json.loads(line) for line in (tmp_path / "whole" / "runs.jsonl").read_text().splitlines()]
    assert [row for row in rows if row["arm"] in ("sft", "pra") and row["level"] == "x0"] == [
        row for row in whole if row["level"] == "x0"
    ]
    # without answers log p alone is there, and the same
    probed = [
        {row["question_id"]: row["log_probability"] for row in own if (row["arm"], row["variant"]) == ("sft", "other")}
        for own in (rows, whole)
    ]
    assert len(probed[1])
    assert probed[1] == pytest.approx(probed[0], abs=1e-4)

    asked = {(row["arm"], row["variant"], row["level"]) for row in rows}
    probes = {("built", "x0"), ("built", "oracle"), ("other", "x2")}
    trained_arms = {(arm, "built", "x0") for arm in ("sft_x2", "pra", "pra_on_policy", "pra_other")}
    assert asked == {(arm, *probe) for arm in ("untrained", "sft") for probe in probes} | trained_arms
    assert all((out / "fold-0" / "seed-1" / arm / "model").is_dir() for arm, *_ in trained_arms)
    result = read_json(out / "result.json")
    assert [step for step, _ in result["traces"]["pra"]] == [1, 2, 3, 4]
    with pytest.raises(ConfigError, match=r"other settings \(pra_steps\)"):
        chain(small(folder, out, pra_steps=4))
    # fine-tuned on an x2 that quotes what x0 holds of the evidence: all of it
    given: dict[str, Any] = {"arms": ("sft",), "probes": (), "x0": "all", "x0_turns": 5, "sft_levels": (0, 2)}
    chain(small(folder, tmp_path / "quoted", sft_variant="quoted", **given))
    learned = read_states(tmp_path / "quoted" / "fold-0" / "states" / "labelled-quoted-gold")
    assert len(learned)
    assert all(summary_of(record).startswith("Key lines:\n") for record in learned if record.split == "train")
