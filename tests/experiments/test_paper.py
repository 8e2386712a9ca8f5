"""Tables and figures: cells by hand counts, states without parts, sheets and answers of others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from experiments.cost.config import InferenceCostConfig
from experiments.paper.memory import table as memory_table
from experiments.paper.memory import taken
from fault_proxy import Proxy, completion
from running import use_words
from scripted_answers import Lines

from experiments.cost.flops import Shape, load_config
from experiments.paper.ablation import STAGES, without
from experiments.paper.cells import product, side_by_side
from experiments.paper.costs import by_stage, operations_of
from experiments.paper.grounding import marked_share
from experiments.paper.judging import read_sheet, sample
from experiments.paper.settings import Setting, pooled
from experiments.paper.systems import FileAnswers, foreign_rows, memory_runs, named_paths, split_records
from experiments.paper.trajectory import phases
from remind.core.errors import ConfigError, DataError
from remind.data.readers.refmem import write_refmem
from remind.evaluation.conditions import Asked, Prompter
from remind.evaluation.config import EvaluateConfig
from remind.evaluation.scores import MEASURES, summarise
from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.memory.config import RunMemoryConfig
from remind.memory.run import run_memory
from remind.memory.score import read_units
from remind.states.dataset import read_states
from remind.states.pyramid import FactualState, Segment, Strategy
from remind.testbed.ladder import LadderConfig, records, write_states
from remind.testbed.world import World, WorldConfig, make_world

WORLD = WorldConfig(train=0, dev=0, test=1, sessions=2, contrary=(0, 1), second_voice=0.0)


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(WORLD)


# answers of another system


@pytest.fixture
def asked(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """The world's questions, and no model that would answer them."""
    monkeypatch.setattr("remind.models.encoder.SentenceEncoder", Lines)
    states = write_states(world, tmp_path / "states", LadderConfig())
    return Setting(0, EvaluateConfig(str(states), "none", "", bootstrap=20))


def write_answers(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_answers_of_another_system_against_a_hand_count(asked: Setting, tmp_path: Path) -> None:
    """Every third question is right, every fourth of the rest cannot be read, the others are wrong."""
    rows, right, quoted = [], {}, {}
    for number, record in enumerate(read_states(asked.evaluate.states)):
        gold = ",".join(record.answers) if record.format == "multi" else record.answers[0]
        wrong = {"multi": "", "single": next(x for x in "ABCD" if x not in record.answers), "direct": "never so"}
        row = {"question_id": record.question_id, "answer": gold if number % 3 == 0 else wrong[record.format]}
        if number % 3 and number % 4 == 0:
            row["answer"] = "" if record.format == "direct" else "no idea"
        if number % 2 == 0:
            evidence = record.images[:1] if record.visual else record.evidence_lines[:1]
            row["explanation"] = str(list(evidence)) if record.visual else "\n".join(map(str, evidence))
        right[record.question_id] = number % 3 == 0
        quoted[record.question_id] = number % 2 == 0
        rows.append(row)
    path = write_answers(tmp_path / "other.jsonl", rows)
    found = foreign_rows(asked, "other", path, tmp_path / "out")
    table = product(pooled([(asked, found)]), 20)
    records_by_id = {record.question_id: record for record in read_states(asked.evaluate.states)}
    for format in ("single", "multi", "direct", "all"):
        for dimension, figures in table[format].items():
            here = [
                r for r in records_by_id.values() if format in ("all", r.format) and dimension in ("all", r.dimension)
            ]
            assert figures["n"] == len(here)
            hits = sum(right[r.question_id] for r in here)
            assert figures["accuracy"]["value"] == pytest.approx(hits / len(here))
            # Eq. 10: samples that quote nothing are not in V; Eq. 11: they are, with 0
            text = [r for r in here if not r.visual and quoted[r.question_id]]
            visual = [r for r in here if r.visual]
            measure = figures["memory_recall_visual"]
            assert (measure["n"] if measure else 0) == len(visual)
            if visual:
                shares = [quoted[r.question_id] / len(r.images) for r in visual]
                assert measure["value"] == pytest.approx(sum(shares) / len(shares))
            measure = figures["memory_recall_text"]
            assert (measure["n"] if measure else 0) == len(text)
            if text:
                shares = [1 / len(set(r.evidence_lines)) for r in text]
                assert measure["value"] == pytest.approx(sum(shares) / len(shares))
    formats = [table[format]["all"]["n"] for format in ("single", "multi", "direct")]
    assert sum(formats) == table["all"]["all"]["n"] == len(rows)
    assert table["all"]["all"]["parse_rate"]["value"] < 1
    assert f"| other | {len(rows)} |" in side_by_side({"other": table})
    # a system that explains nothing takes no part in MemR
    bare = write_answers(tmp_path / "bare.jsonl", [{k: r[k] for k in ("question_id", "answer")} for r in rows])
    silent = pooled([(asked, foreign_rows(asked, "bare", bare, tmp_path / "out-bare"))])
    assert summarise(silent.values(), 20)["memory_recall"] is None
    assert summarise(silent.values(), 20)["accuracy"] == table["all"]["all"]["accuracy"]


def test_a_system_may_have_answered_other_splits_and_need_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_words(monkeypatch.setattr)
    world = make_world(replace(WORLD, train=1))
    states = write_states(world, tmp_path / "states", LadderConfig())
    asked, known = split_records(Setting(0, EvaluateConfig(str(states), "none", "")))
    ids = {record.question_id: record.split for record in read_states(states)}
    test = {name for name, split in ids.items() if split == "test"}
    assert {record.question_id for record in asked} == test < set(ids)
    assert sorted(known) == sorted(ids)
    # a run of memory systems asks what the file, or the states of a file that does not say so, have in the split
    bare = tuple(replace(question, split=None) for question in world.corpus.questions)
    for name, corpus in (("own", world.corpus), ("bare", replace(world.corpus, questions=bare))):
        file = tmp_path / f"{name}.jsonl"
        write_refmem(corpus, file)
        cfg = RunMemoryConfig(str(file), str(tmp_path / name), ["bm25"], k=[1], budgets=[], split="test")
        if name == "bare":
            with pytest.raises(ConfigError, match=f"split: question {bare[0].id!r} has none; set states"):
                run_memory(cfg)
            cfg = replace(cfg, states=str(states))
        units = list(read_units(run_memory(cfg)))
        assert {row["question"] for unit in units if unit["system"] == "bm25" for row in unit["rows"]} == test
    with pytest.raises(ConfigError, match="set split to the one to ask"):
        replace(cfg, split=None)


def test_answers_that_cannot_be_used(tmp_path: Path) -> None:
    def refused(rows: list[dict[str, Any]]) -> str:
        path = write_answers(tmp_path / "answers.jsonl", rows)
        with pytest.raises(DataError) as error:
            FileAnswers("other", path, ["q1", "q2", "q3"], ["q2", "q3"])
        return str(error.value)

    told = refused([{"question_id": name, "answer": "A"} for name in ("q9", "q1", "q8")])
    assert "2 ids that are no question here (first: 'q9')" in told
    assert "2 questions without an answer (first: 'q2')" in told
    assert "answers.jsonl [line 2]: question 'q2' is answered twice" in refused(
        [{"question_id": "q2", "answer": "A"}] * 2
    )
    assert "[line 1]: needs question_id and answer as text" in refused([{"question_id": "q2", "answer": ["A"]}])
    for systems, message in (
        (["x"], "is neither NAME=PATH"),
        (["x0=runs"], "a name of its own"),
        ([f"a={tmp_path}", "b=/no/where", "c=/no/there"], "there is no /no/where, /no/there"),
    ):
        with pytest.raises(ConfigError, match=message):
            named_paths(systems)


def test_a_run_of_memory_systems_against_a_hand_count(
    asked: Setting, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that always chooses A, or A and B, and knows one phrase."""
    use_words(monkeypatch.setattr)
    records = read_states(asked.evaluate.states)
    phrase = next(record.answers[0] for record in records if record.format == "direct")

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        told = body["messages"][0]["content"]
        chosen = "A" if "Exactly one of the options" in told else "A, B" if "One or more" in told else phrase
        return 200, {}, completion(chosen)

    write_refmem(world.corpus, tmp_path / "world.jsonl")
    settings: dict[str, Any] = {"systems": ["bm25", "session"], "k": [1], "budgets": []}
    with Proxy(answer=answer) as proxy:
        llm = LLMConfig(EndpointConfig("m", proxy.url, price_prompt=1e6), cache=str(tmp_path / "replies.sqlite"))
        run = run_memory(RunMemoryConfig(str(tmp_path / "world.jsonl"), str(tmp_path / "run"), llm=llm, **settings))
    given = named_paths([str(run)])
    assert [*given] == ["bm25", "full_context", "gold", "no_context", "session"]
    assert memory_runs([str(run), f"x={run}"]) == [run]
    found = pooled([(asked, foreign_rows(asked, "bm25", given["bm25"], tmp_path / "out"))])
    assert len(found) == len(records)
    for format, letters in (("single", {"A"}), ("multi", {"A", "B"})):
        here = [record for record in records if record.format == format]
        hits = sum({*record.answers} == letters for record in here)
        assert product(found, 20)[format]["all"]["accuracy"]["value"] == pytest.approx(hits / len(here))
    direct = [record for record in records if record.format == "direct"]
    known = sum(phrase in record.answers for record in direct)
    assert product(found, 20)["direct"]["all"]["accuracy"]["value"] >= known / len(direct) > 0
    # by hand: a call for each question, of 10 and 3 tokens, for 10 and 0 USD
    rows = {row["system"]: row for row in taken([run])}
    assert [*rows] == ["no_context", "full_context", "gold", "bm25", "session"]
    spent = {"calls": 1, "prompt_tokens": 10, "completion_tokens": 3, "tokens": 13, "usd": pytest.approx(10)}
    assert rows["bm25"]["question"] == spent
    assert rows["bm25"]["ingest"]["calls"] == 0
    (line,) = [line for line in "\n".join(memory_table([*rows.values()])).splitlines() if line.startswith("| bm25 |")]
    assert line.startswith(f"| bm25 | refmem | {len(records)} | 0 | 0 | 0.0000 | 1.00 | 13.0 | 10.000000 |")
    # a system of that name, and a run without answers
    with pytest.raises(ConfigError, match="has bm25, which is named already"):
        named_paths([f"bm25={run / 'answers' / 'bm25.jsonl'}", str(run)])
    bare = run_memory(RunMemoryConfig(str(tmp_path / "world.jsonl"), str(tmp_path / "bare"), **settings))
    with pytest.raises(DataError, match="the run has no answers"):
        named_paths([str(bare)])


# states without parts of them


def test_every_combination_of_strategy_markers_and_summary(world: World) -> None:
    whole = records(world, LadderConfig())
    variants = {
        (strategy, markers): without(whole, world.corpus, strategy, markers)
        for strategy in (True, False)
        for markers in (True, False)
    }
    assert variants[True, True] == whole
    plain = Prompter().prompts("evidence", Asked(whole))
    found = set()
    for name, (strategy, markers, summarised) in STAGES.items():
        level = "x2" if summarised else "x1" if markers else "x0"
        texts = [record.level(level).text for record in variants[strategy, markers]]
        for record, text in zip(whole, texts, strict=True):
            guides = [record.x0.text[start:end] for start, end in record.x0.reasoning]
            assert all((guide in text) == strategy for guide in guides)
            assert ("[ATTENTION]" in text.split("\n\nConversation\n")[1]) == (markers and bool(record.x1.markers))
            assert ("\nReflection\n" in text) == summarised
        if name == "evidence":
            assert texts == [prompt.text for prompt in plain]
        found.add(tuple(texts))
    assert len(found) == len(STAGES) == 8


def test_gold_turns_inside_blocks_by_brute_force(world: World) -> None:
    dialogue = world.dialogues[0]
    question = world.questions[0].question
    state = FactualState(dialogue, question, (Segment(2, 4), Segment(9, 11)), Strategy(()))
    gold = frozenset({3, 9, 20})
    # shown turns 0 to 5 are positions 2, 3, 4, 9, 10, 11
    assert marked_share(state, [(1, 2)], gold) == pytest.approx(1 / 3)
    assert marked_share(state, [(0, 1), (3, 3)], gold) == pytest.approx(2 / 3)
    assert marked_share(state, [(n, n) for n in range(6)], gold) == pytest.approx(2 / 3)
    assert marked_share(state, [], gold) == 0


# figures of rows


def test_what_cannot_be_read_is_wrong_and_counted() -> None:
    row: dict[str, Any] = dict.fromkeys(MEASURES)
    row |= {"format": "single", "dimension": None, "dialogue_id": "d"}
    given = {
        "right": {**row, "accuracy": 1.0, "parse_rate": 1.0},
        "unparsable": {**row, "accuracy": 0.0, "parse_rate": 0.0},
        "no verdict": {**row, "accuracy": None, "parse_rate": 1.0},
        "no reply": {**row, "accuracy": None, "parse_rate": None},
        "left out": {**row, "accuracy": 0.0, "parse_rate": 0.0, "left_out": "no gold evidence"},
    }
    first = Setting(1, EvaluateConfig("s", "m", "o"), own_dialogues=True)
    rows = pooled([(first, given), (replace(first, seed=2), given)])
    assert set(rows) == {f"{seed}/{name}" for seed in (1, 2) for name in given if name != "left out"}
    assert {one["dialogue_id"] for one in rows.values()} == {"1/d", "2/d"}
    figures = summarise(rows.values(), 20)
    assert figures["n"] == 8
    assert (figures["parse_rate"]["value"], figures["parse_rate"]["n"]) == (pytest.approx(2 / 3), 6)
    assert (figures["accuracy"]["value"], figures["accuracy"]["n"]) == (0.5, 4)


def test_stages_hold_all_operations_once() -> None:
    parts = {
        "index": 1,
        "retrieval": 20,
        "strategy": 300,
        "grounding": 4000,
        "summary": 50000,
        "read": 6,
        "answer": 0.5,
    }
    (row,) = by_stage([{"way": "x2/1", "title": "x2", "history": 9, "parts": parts}])
    assert [row[name] for name in row if name.startswith("(")] == [21, 54300, 6.5]


def test_operations_of_a_memory_system_by_hand() -> None:
    """Ten turns ingested by five calls of 200 and 20 tokens; a question takes two of 100 and 10."""
    ingest = {"calls": 5, "prompt_tokens": 1000, "completion_tokens": 100}
    question = {"calls": 2, "prompt_tokens": 200, "completion_tokens": 20}
    row = {"system": "mem0", "dataset": "locomo", "turns": 10, "ingest": ingest, "question": question}
    cost = InferenceCostConfig("", "nano", "nano", lengths=(400, 4000), questions=(1, 50))
    shape = Shape.of(load_config("nano"))
    found = operations_of(row, cost, shape)
    assert (found["turn"], found["question"]) == (shape.reply(200, 20) / 2, 2 * shape.reply(100, 10))
    # torch counts all of the square
    assert found["counted"] == 2 * shape.prefill(100, dense=True)
    # 100 turns of 40 tokens for 50 questions
    assert found["curve"][1]["operations"] == 2 * found["turn"] + found["question"]
    assert found["curve"][1]["calls"] == {"all": 2 * 5 / 10 + 2}
    retrieval = operations_of(
        {**row, "ingest": dict.fromkeys(ingest, 0), "question": dict.fromkeys(question, 0)}, cost, shape
    )
    assert (retrieval["turn"], retrieval["question"], retrieval["counted"]) == (0, 0, None)


def test_phases_of_training_by_hand() -> None:
    rows: list[dict[str, Any]] = [
        {"step": step, "kind": "train", "share_hard": step / 10, "jsd01": float(step)} for step in range(1, 11)
    ]
    # a step measured again after a resumed run counts once, a measurement of the held-out loss not at all
    early, middle, late = phases([*rows, rows[3], {"step": 3, "kind": "eval", "jsd01": 99.0}])
    assert (early["steps"], middle["steps"], late["steps"]) == (3, 4, 3)
    assert (early["jsd01"], middle["jsd01"], late["jsd01"]) == (2.0, 5.5, 9.0)
    assert late["share_hard"] == pytest.approx(0.9)


# labels


def test_a_sample_is_drawn_by_dimension_and_seed(world: World) -> None:
    every = records(world, LadderConfig())
    chosen = sample(every, 1, 0)
    assert {r.format for r in chosen} == {"direct"}
    dimensions = [r.dimension for r in chosen]
    assert sorted(set(map(str, dimensions))) == sorted({str(r.dimension) for r in every if r.format == "direct"})
    assert len(dimensions) == len(set(dimensions))
    assert sample(every[::-1], 1, 0) == chosen[::-1]
    assert len({tuple(r.question_id for r in sample(every, 1, seed)) for seed in range(8)}) > 1


def test_a_label_sheet_is_read_as_it_says(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"

    def lines(*cells: str) -> Path:
        path.write_text("\n".join(["question_id,label", *cells]) + "\n")
        return path

    assert read_sheet(lines("q1,yes", "'-q2, 0", "q3,TRUE"), ["q1", "-q2", "q3"]) == {
        "q1": True,
        "-q2": False,
        "q3": True,
    }
    for cells, message in (
        (["q1,maybe", "q2,1"], r"\[line 2\]: 'maybe' is no label"),
        (["q1,", "q2,"], r"2 answers without a label \(first: 'q1'\)"),
        (["q1,1", "q2,1", "q7,0"], r"1 labels of questions that are not in the sample \(first: 'q7'\)"),
        (["q1,1", "q1,0"], r"\[line 3\]: question 'q1' is labelled twice"),
    ):
        with pytest.raises(DataError, match=message):
            read_sheet(lines(*cells), ["q1", "q2"])
    path.write_text("id,label\n")
    with pytest.raises(DataError, match="has no column question_id"):
        read_sheet(path, [])
