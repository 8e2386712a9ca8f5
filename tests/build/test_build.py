"""From a file to states on disk, on the bundled sample and on real data; bad input leaves nothing behind."""

import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import DatasetDict
from small_corpus import rows

import remind.build.states
from remind import PRAConfig, PRATrainer, read
from remind.build import BuildStatesConfig, build_states
from remind.build.states import with_cap
from remind.commands import main
from remind.core.errors import ConfigError, DataError
from remind.data.dialogue import NO_INFORMATION
from remind.data.sample import sample_path
from remind.evaluation.contexts import Prompter, questions_of
from remind.models.backbone import load_backbone, size_of
from remind.states.dataset import read_manifest, read_states
from remind.states.pyramid import MARKER
from remind.states.records import summary_of
from sae import TopKSAE, layer_folder


def test_states_of_another_backbone_differ_in_their_marks_alone(corpus: Path, tmp_path: Path, minilm_sae: Path) -> None:
    nano_sae = TopKSAE(128, 256, 8, generator=torch.Generator().manual_seed(0))
    nano_sae.save(layer_folder(tmp_path / "nano-sae", 2))
    folders = [tmp_path / "minilm", tmp_path / "nano"]
    for folder, saes in zip(folders, (minilm_sae, tmp_path / "nano-sae"), strict=True):
        build_states(str(corpus), backbone=folder.name, saes=saes, limit=1, out=folder, cache=str(tmp_path / "cache"))
        records = read_states(folder)
        assert read_manifest(folder)["counts"]["questions"] == len(records) == 6
        for record in records:
            assert record.target is not None
            assert len(record.salience) == len(record.x0.turns)
        assert any(MARKER in record.x1.text for record in records)
    # x0 knows nothing of backbone or SAE
    first, second = map(read_states, folders)
    assert [record.x0 for record in first] == [record.x0 for record in second]
    assert [record.x1 for record in first] != [record.x1 for record in second]


def test_a_teacher_that_sees_the_evidence_quoted(corpus: Path, tmp_path: Path) -> None:
    corpus.write_text(corpus.read_text().replace('(0)", "images": []', '(0)", "images": [{"caption": "a mug"}]'))
    states = build_states(str(corpus), summary="evidence", limit=1, out=tmp_path / "out", cache=str(tmp_path / "cache"))
    assert read_manifest(tmp_path / "out")["sae"] == {}
    pictured = 0
    for record in read_states(tmp_path / "out"):
        shown = record.x0.text.split("\n")
        held = []
        for line in record.evidence_lines:
            if line in shown:
                captions = takewhile(lambda one: one.startswith("[Image #"), shown[shown.index(line) + 1 :])
                held += [line, *captions]
        pictured += sum(line.startswith("[Image #") for line in held)
        assert record.x1.text == record.x0.text
        assert summary_of(record) == ("\n".join(["Key lines:", *held]) if held else "")
    assert pictured > 0
    assert any(
        x2["text"] != x0["text"] for part in states.values() for x0, x2 in zip(part["x0"], part["x2"], strict=True)
    )


def test_images_that_came_later_are_shown_by_the_next_build(corpus: Path, tmp_path: Path) -> None:
    for n in (0, 1):
        pictured = f'({n})", "images": [{{"source": "https://e.org/{n}.png", "caption": "a mug"}}]'
        corpus.write_text(corpus.read_text().replace(f'({n})", "images": []', pictured))
    images, given = tmp_path / "images", {"summary": "evidence", "cache": str(tmp_path / "cache")}
    images.mkdir()

    def shown(**more: Any) -> list[str]:
        build_states(str(corpus), out=tmp_path / "out", images=str(images), **given, **more)
        paths = {picture.path for record in read_states(tmp_path / "out") for picture in record.pictures}
        return sorted(Path(path).name for path in paths)

    (images / "0.png").write_bytes(b"x")
    assert shown() == ["0.png"]
    (images / "no.txt").write_bytes(b"of nobody")
    assert shown() == ["0.png"]
    (images / "1.png").write_bytes(b"x")
    with pytest.raises(ConfigError, match="built from other input or settings"):
        shown()
    assert shown(overwrite=True) == ["0.png", "1.png"]


def test_bad_input_is_one_line_and_leaves_nothing(
    corpus: Path, tmp_path: Path, minilm_sae: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus.write_text(corpus.read_text().replace('"t2", "speaker"', '"t1", "speaker"'))
    before = sorted(tmp_path.iterdir())
    given = ["--input", corpus, "--out", tmp_path / "new" / "out", "--cache", tmp_path.parent / "cache"]
    with pytest.raises(SystemExit, match="2"):
        main(["build-states", *map(str, given), "--sae", str(minilm_sae)])
    error = capsys.readouterr().err
    assert error.startswith(f"error: {corpus} [")
    assert "turn id 't1' occurs twice" in error
    assert (error.count("\n"), sorted(tmp_path.iterdir())) == (1, before)


def test_retrieval_leaves_a_backbone_that_reads_x0_at_once_room_for_the_rest() -> None:
    def cap(backbone: str, cap: int | None = None, codes: str = "auto") -> int | None:
        cfg = BuildStatesConfig("in", "out", backbone=backbone)
        cfg.perception.retrieve.max_context_tokens, cfg.grounding.context_codes = cap, codes  # type: ignore[assignment]
        return with_cap(cfg, size_of(backbone)).perception.retrieve.max_context_tokens

    for name in ("minilm", "nano"):  # without loading it
        whole = load_backbone(name)
        assert size_of(name) == (whole.name, whole.n_layers, whole.hidden_size, whole.causal, whole.max_length)
    assert (cap("nano"), cap("nano", 300)) == (24_576, 300)  # three quarters of 32,768
    assert (cap("nano", codes="windowed"), cap("minilm")) == (None, None)
    assert cap("minilm", codes="joint") == 384


def test_questions_of_ones_own_about_each_dialogue(
    tmp_path: Path, minilm_sae: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(2)))
    words = ["build-states", "--input", path, "--out", out, "--cache", tmp_path / "cache", "--sae", minilm_sae]
    words += ["--perception.kind", "infer"]
    texts = ["What does Ana drink: tea?", "[Who] sold a violin?"]
    asking = [word for text in texts for word in ("--ask", text)]
    main([*map(str, words), *asking])
    assert "4 questions over 2 dialogues (4 test)" in capsys.readouterr().out
    records = read_states(out, "test")
    assert [record.question_id for record in records] == ["c0-ask1", "c0-ask2", "c1-ask1", "c1-ask2"]
    assert [record.question for record in records] == 2 * texts
    assert {(record.target, record.evidence) for record in records} == {(None, ())}
    assert read_manifest(out)["kind"] == "infer"
    # neither question is of a dimension, by their words
    assert read_manifest(out)["kinds"] == {"factual": {"n": 4, "as_gold": 4}}
    assert {record.kind for record in records} == {"factual"}
    assert read_manifest(out)["abstention"] is all(NO_INFORMATION in record.x0.text for record in records) is True
    for wrong in ([], ["good?", " "]):
        with pytest.raises(ConfigError, match="none of them blank"):
            BuildStatesConfig("in", "out", ask=wrong)


def test_few_dialogues_are_those_that_every_step_needs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"levels": ("x0",), "cache": str(tmp_path), "limit": 1}
    states = build_states(str(sample_path()), dialogues=3, **settings)
    chosen = {name: part["dialogue_id"][0] for name, part in states.items()}
    assert chosen == {"train": "c01", "test": "c10", "dev": "c08"}
    # without splits of its own the first ones, divided as if there were no others
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(3)))
    states = build_states(str(path), dialogues=2, **settings)
    assert sorted(name for part in states.values() for name in part["dialogue_id"]) == ["c0", "c1"]
    assert {"train", "test"} <= states.keys()


def test_a_split_that_shares_evidence_is_refused_or_reported(
    tmp_path: Path, minilm_sae: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A question set with a split of its own, in JSON of its own shape."""
    talk = rows(2)
    asked = [{**row, "split": "train" if str(row["id"]).endswith("a") else "test"} for row in talk if "question" in row]
    asked[1]["evidence"], asked[3]["evidence"] = ["t3", "t2"], ["t2"]
    (tmp_path / "set.json").write_text(json.dumps({"talk": [row for row in talk if "sessions" in row], "qa": asked}))
    (tmp_path / "map.yaml").write_text(
        "dialogue: {records: talk, id: id, sessions: sessions}\n"
        "session: {id: id, turns: turns}\n"
        "turn: {id: id, speaker: speaker, text: text}\n"
        "question: {records: qa, dialogue: context_id, id: id, text: question, options: options, answers: answers,\n"
        "  evidence: evidence, split: split}\n"
    )
    out = tmp_path / "out"
    words = ["build-states", "--input", str(tmp_path / "set.json"), "--format", str(tmp_path / "map.yaml")]
    words += ["--sae", str(minilm_sae), "--cache", str(tmp_path / "cache"), "--out", str(out)]
    with pytest.raises(SystemExit):
        main(words)
    shared = "turn t2 of c0 is evidence of training question q0a too, the first of 2 shared, which 2 test questions"
    assert f"set.json [q0b]: {shared}" in capsys.readouterr().err
    assert not out.exists()
    main([*words, "--split.overlap", "report"])
    assert f"overlap: {shared}" in capsys.readouterr().out
    manifest = read_manifest(out)
    first = {"first": "turn t2", "dialogue_id": "c0", "train": "q0a", "test": "q0b"}
    assert manifest["overlap"] == {"pieces": 2, "questions": 2, **first}
    assert set(manifest["inputs"]) == {"set.json", "map.yaml"}
    assert [record.question_id for record in read_states(out, "test")] == ["q0b", "q1b"]


def test_lower_levels_are_those_of_a_whole_build_and_cost_no_saes(
    corpus: Path, minilm_sae: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of all questions, or of those of a split."""
    cache = str(tmp_path / "cache")
    whole = build_states(read(corpus), saes=minilm_sae, cache=cache, out=tmp_path / "whole")
    assert isinstance(whole, DatasetDict)
    assert all(part.cache_files for part in whole.values())  # memory-mapped
    # as one filters and maps it
    some = whole["test"].filter(lambda row: row["format"] == "direct").map(lambda row: {"dimension": None})
    assert 0 < sum(len(one.records) for one in questions_of(some, "test").asked()) == len(some) < len(whole["test"])
    capsys.readouterr()
    by_split = {"train": ["x0", "x1", "x2"], "test": "x0"}
    split = build_states(str(corpus), saes=minilm_sae, cache=cache, levels=by_split, out=tmp_path / "split")
    manifest = read_manifest(tmp_path / "split")
    segments = manifest["counts"]["segments"]
    assert f"36 turns in {segments} segments, {36 / segments:.1f} each" in capsys.readouterr().out
    assert manifest["evidence_recall"]["all"]["n"] == 12
    # evaluation of x0 finds the same bytes, and training of test questions nothing
    for name, part in split.items():
        for row, full in zip(part, whole[name], strict=True):
            assert [row[level] for level in ("x1", "x2")] == [
                full[level] if name != "test" else None for level in ("x1", "x2")
            ]
    asked = (whole["test"], split["test"], tmp_path / "whole", tmp_path / "split")
    seen = [[Prompter().prompts("x0", part) for part in questions_of(states, "test").asked()] for states in asked]
    assert seen[0] == seen[1] == seen[2] == seen[3] != []
    with pytest.raises(DataError, match="an edge or hard level needs x1"):
        PRATrainer("nano-untrained", PRAConfig(str(tmp_path / "run"), use_cpu=True), split["test"]).train()
    monkeypatch.setattr(remind.build.states, "load_backbone", lambda *_, **__: pytest.fail("the backbone was loaded"))
    monkeypatch.setattr(remind.build.states, "folder_of_saes", lambda *_: pytest.fail("SAEs were trained"))
    one = build_states(str(corpus), levels=("x0",), cache=cache)
    for name, part in one.items():
        assert {"x0", "x1", "x2"} & set(part.column_names) == {"x0"}
        assert part["x0"][:] == split[name]["x0"][:] == whole[name]["x0"][:]
    with pytest.raises(DataError, match=r"no level 'x1'; there are x0; build the states with it"):
        Prompter().prompts("x1", next(questions_of(one, "test").asked()))
    with pytest.raises(ConfigError, match="has no setting limits"):
        build_states(str(corpus), limits=3)


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ("x1", "levels are x0, x0 and x1, or x0, x1 and x2, not x1"),
        ("{test: [x0, x2]}", "levels are x0, x0 and x1, or x0, x1 and x2, not x0, x2"),
        ("{tests: [x0]}", "levels: 'tests' is no split; there are train, dev, test"),
    ],
)
def test_levels_that_cannot_be_built(levels: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["build-states", "--input", "i", "--out", "o", "--levels", levels])
    error = capsys.readouterr().err
    assert (message in error, error.count("\n")) == (True, 1)
