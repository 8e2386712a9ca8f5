"""From a file to states on disk, on the bundled sample and on real data; bad input leaves nothing behind."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from datasets import DatasetDict, load_dataset
from small_corpus import rows, strip_markers

import remind.build.states
from benchmarks.count_files import Entered, question
from remind import read
from remind.build import BuildStatesConfig, build, build_states
from remind.build.states import with_cap
from remind.commands import main
from remind.core.errors import ConfigError, DataError, ModelError
from remind.data.dialogue import NO_INFORMATION
from remind.data.sample import sample_path
from remind.evaluation.conditions import Prompter, questions_of
from remind.models.backbone import load_backbone, size_of
from remind.states.dataset import iterate_states, read_manifest, read_states
from remind.states.pyramid import MARKER
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
            assert strip_markers(record.x1) == record.x0.text[slice(*record.x0.dialogue)]
            assert record.x2.text.startswith(record.x1.text[: record.x1.text.rindex("\nQuestion:") - 1])
            assert record.target is not None
            assert len(record.salience) == len(record.x0.turns)
        assert any(MARKER in record.x1.text for record in records)
    # x0 knows nothing of backbone or SAE
    first, second = map(read_states, folders)
    assert [record.x0 for record in first] == [record.x0 for record in second]
    assert [record.x1 for record in first] != [record.x1 for record in second]


@pytest.mark.parametrize("kind", ["turn twice", "key"])
def test_bad_input_is_one_line_and_leaves_nothing(
    kind: str, corpus: Path, tmp_path: Path, minilm_sae: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = ["--sae", str(minilm_sae)]
    if kind == "turn twice":
        corpus.write_text(corpus.read_text().replace('"t2", "speaker"', '"t1", "speaker"'))
        place, word = corpus.name, "t1"
    else:
        settings = tmp_path / "settings.yaml"
        settings.write_text("limit: 3\ngrounding:\n  alpah: 3\n")
        extra += ["--config", str(settings)]
        place, word = f"{settings}:3: ", "alpah"
    before = sorted(tmp_path.iterdir())
    given = ["--input", corpus, "--out", tmp_path / "new" / "out", "--cache", tmp_path.parent / "cache", *extra]
    with pytest.raises(SystemExit, match="2"):
        main(["build-states", *map(str, given)])
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert word in errors
    assert place in errors
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("layer", "width", "word"),
    [
        (3, 384, "the SAE of layer 3 reads hidden states of width 384, but those of nano are 128 wide"),
        (9, 128, "there is an SAE for layer 9, but nano has layers 0 to 4"),
        (None, 128, "holds no SAE"),
    ],
)
def test_saes_that_do_not_fit_are_seen_before_the_first_dialogue(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: int | None, width: int, word: str
) -> None:
    sae = tmp_path / "sae"
    if layer is not None:
        TopKSAE(width, 64, 4).save(layer_folder(sae, layer))
    monkeypatch.setattr(remind.build.states.DialogueBuilder, "build", lambda *_: pytest.fail("a dialogue was begun"))
    cfg = BuildStatesConfig(
        str(corpus), str(tmp_path / "out"), backbone="nano", sae=str(sae), cache=str(tmp_path / "cache")
    )
    with pytest.raises(ModelError) as caught:
        build(cfg)
    assert str(caught.value).startswith(f"{sae}: {word}")


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
    assert {name: part["dialogue_id"] for name, part in states.items()} == {
        "train": ["c01"],
        "test": ["c10"],
        "dev": ["c08"],
    }
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
    error = capsys.readouterr().err
    assert "set.json [q0b]: turn t2 of c0 is evidence of training question q0a too, the first of 2 shared, " in error
    assert not out.exists()
    main([*words, "--split.overlap", "report"])
    assert "turns and images: 2, test questions: 2; the first is turn t2 of c0" in capsys.readouterr().out
    manifest = read_manifest(out)
    first = {"first": "turn t2", "dialogue_id": "c0", "train": "q0a", "test": "q0b"}
    assert manifest["overlap"] == {"pieces": 2, "questions": 2, **first}
    assert set(manifest["inputs"]) == {"set.json", "map.yaml"}
    assert [record.question_id for record in read_states(out, "test")] == ["q0b", "q1b"]


def test_states_are_a_dataset_that_anybody_opens(corpus: Path, minilm_sae: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    states = build_states(read(corpus), saes=minilm_sae, out=tmp_path / "out", cache=cache)
    assert isinstance(states, DatasetDict)
    opened = load_dataset(str(tmp_path / "out"))
    assert {name: part.num_rows for name, part in opened.items()} == {n: p.num_rows for n, p in states.items()}
    assert sum(part.num_rows for part in states.values()) == 12
    for name, part in states.items():
        assert part.features == opened[name].features
        assert {row["split"] for row in part} == {name}
        assert part.cache_files  # memory-mapped
    # as one filters and maps it
    kept = states["test"].filter(lambda row: row["format"] == "direct").map(lambda row: {"dimension": None})
    records = list(iterate_states(kept))
    assert 0 < len(records) < states["test"].num_rows
    assert sum(len(one.records) for one in questions_of(kept, "test").asked()) == len(records)
    # without a folder, from a file: the same
    again = build_states(str(corpus), saes=minilm_sae, cache=cache)
    assert [row for part in again.values() for row in part] == [row for part in states.values() for row in part]


def test_a_question_passes_through_28_files_and_240_functions_at_most(corpus: Path, minilm_sae: Path) -> None:
    entered = Entered()
    question(entered, Namespace(input=str(corpus), sae=str(minilm_sae)))
    assert "DialogueBuilder.build" in entered.functions["remind/build/states.py"]
    assert "token_resonance" in entered.functions["remind/grounding/resonance.py"]
    assert len(entered.functions) <= 28, entered
    assert sum(map(len, entered.functions.values())) <= 240, entered


def test_lower_levels_cost_no_saes_and_no_summaries(
    corpus: Path, minilm_sae: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = build_states(str(corpus), saes=minilm_sae, cache=str(tmp_path / "cache"))
    written = "remind.perception.auxiliary.OfflineLLM.summaries"
    monkeypatch.setattr(written, lambda *_: pytest.fail("a summary was written"))
    two = build_states(str(corpus), saes=minilm_sae, levels=("x0", "x1"), cache=str(tmp_path / "cache"))
    monkeypatch.setattr(remind.build.states, "load_backbone", lambda *_, **__: pytest.fail("the backbone was loaded"))
    monkeypatch.setattr(remind.build.states, "folder_of_saes", lambda *_: pytest.fail("SAEs were trained"))
    one = build_states(str(corpus), levels=("x0",), cache=str(tmp_path / "cache"))
    for levels, built in ((("x0", "x1"), two), (("x0",), one)):
        for name, part in built.items():
            assert {"x0", "x1", "x2"} & set(part.column_names) == set(levels)
            for row, full in zip(part, whole[name], strict=True):
                assert all(row[level] == full[level] for level in levels)
                assert row["target"] == full["target"]
    with pytest.raises(DataError, match=r"no level 'x1'; there are x0; build the states with it"):
        Prompter().prompts("x1", next(questions_of(one, "test").asked()))
    with pytest.raises(ConfigError, match="levels are x0, x0 and x1, or x0, x1 and x2, not x1"):
        build_states(str(corpus), levels=("x1",))
    with pytest.raises(ConfigError, match="has no setting limits"):
        build_states(str(corpus), limits=3)
