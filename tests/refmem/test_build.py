"""One command from dialogues to a benchmark: killed and resumed, changed, without images, and with annotations."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from forked import Forked

from remind.core.cli import parse
from remind.core.errors import ConfigError, DataError
from remind.core.files import read_json
from remind.data.dialogue import DIMENSIONS, TEXT_DIMENSIONS, Corpus, Dialogue
from remind.data.readers import read, write_refmem
from remind.data.split import SplitConfig, assign_splits
from remind.refmem.build import Build, build_refmem, open_corpus
from remind.refmem.config import RefMemConfig
from remind.refmem.items import read_items, write_items
from remind.refmem.stages import locked

STAGES = ("segments", "images", "clusters", "items", "filtered", "benchmark")
KILLED = """
import os, signal, sys
from remind.refmem import build
from remind.refmem.config import RefMemConfig

def dying(path, items):
    path.write_text("half a line")
    os.kill(os.getpid(), signal.SIGKILL)

build.write_items = dying
build.build_refmem(RefMemConfig(sys.argv[1], sys.argv[2]))
"""


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def dialogues(tmp_path: Path, corpus: Corpus) -> str:
    path = tmp_path / "dialogues.jsonl"
    write_refmem(corpus, path)
    return str(path)


def test_killed_and_resumed_it_gives_the_same_bytes(dialogues: str, tmp_path: Path, corpus: Corpus) -> None:
    whole = tmp_path / "whole"
    result = build_refmem(RefMemConfig(dialogues, str(whole)))
    broken = tmp_path / "broken"
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    assert Forked(script, dialogues, broken).wait(300) == -signal.SIGKILL
    # nothing half-written under a stage's name
    assert [name for name in STAGES if (broken / name).exists()] == ["segments", "images", "clusters"]
    assert any(path.name.endswith(".tmp") for path in broken.iterdir())
    build = Build(RefMemConfig(dialogues, str(broken)), open_corpus(RefMemConfig(dialogues, str(broken))))
    with locked(broken):
        build.run()
    assert build.stages.done == {name: name in ("segments", "images", "clusters") for name in STAGES}
    assert files(broken) == files(whole)

    # what came out is the toolkit's own format, split as it says
    made = read(result)
    assert made.dialogues == corpus.dialogues
    assert not made.dangling
    assert {question.dimension for question in made.questions} == set(DIMENSIONS)
    assert assign_splits(made, SplitConfig()) == {question.id: question.split for question in made.questions}
    clusters = {item.id: item.cluster_id for item in read_items(whole / "benchmark" / "items.jsonl")}
    sides = [{clusters[q.id] for q in made.questions if q.split == side} for side in ("train", "test")]
    assert all(sides)
    assert not sides[0] & sides[1]
    told = read_json(whole / "benchmark" / "statistics.json")
    assert told["questions"]["total"] == len(made.questions)
    assert told["filters"]["in"] == told["filters"]["kept"] + sum(told["filters"]["removed"].values())


def test_a_changed_setting_redoes_what_hangs_on_it(
    dialogues: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = RefMemConfig(dialogues, str(tmp_path / "out"))

    def done(cfg: RefMemConfig) -> list[str]:
        build = Build(cfg, open_corpus(cfg))
        build.run()
        return [name for name, found in build.stages.done.items() if not found]

    assert done(cfg) == list(STAGES)
    assert done(cfg) == []
    assert done(replace(cfg, train=0.5)) == ["benchmark"]
    assert done(replace(cfg, filters=replace(cfg.filters, blind_draws=0))) == ["filtered", "benchmark"]
    few = replace(cfg, questions=replace(cfg.questions, per_cluster=1))
    assert done(few) == ["items", "filtered", "benchmark"]
    talk = Path(dialogues)
    talk.write_text(talk.read_text().replace("the pottery", "the ceramics"))
    assert done(few) == list(STAGES)

    # annotators' items take the place of the filtered ones; of another build they are refused
    kept = read_items(tmp_path / "out" / "filtered" / "items.jsonl")
    final = tmp_path / "final.jsonl"
    write_items(final, kept[::2])
    result = build_refmem(replace(few, adjudicated=str(final)))
    assert [question.id for question in read(result).questions] == [item.id for item in kept[::2]]
    assert f"benchmark: {result}" in capsys.readouterr().out
    before = files(tmp_path / "out" / "benchmark")
    for strange in (replace(kept[0], cluster_id="talk/text-999"), replace(kept[0], evidence=("D77:1",), images=())):
        write_items(final, [strange])
        with pytest.raises(DataError, match=kept[0].id):
            build_refmem(replace(few, adjudicated=str(final)))
    with pytest.raises(DataError, match="no such file"):
        build_refmem(replace(few, adjudicated=str(tmp_path / "nowhere.jsonl")))
    assert files(tmp_path / "out" / "benchmark") == before


def test_one_dialogue_without_images(
    tmp_path: Path, make_dialogue: Callable[..., Dialogue], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.jsonl"
    write_refmem(Corpus((make_dialogue(images=False),)), path)
    result = build_refmem(RefMemConfig(str(path), str(tmp_path / "out")))
    made = read(result)
    assert {question.dimension for question in made.questions} <= set(TEXT_DIMENSIONS)
    assert {question.split for question in made.questions} == {"train", "test"}
    assert "no items for:" in capsys.readouterr().out


def test_what_cannot_be_built_is_told_in_a_line(
    tmp_path: Path, make_dialogue: Callable[..., Dialogue], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "short.jsonl"
    write_refmem(Corpus((make_dialogue(sessions=1),)), path)
    cfg = RefMemConfig(str(path), str(tmp_path / "out"), until="clusters")
    assert build_refmem(cfg) == tmp_path / "out" / "clusters"
    with locked(tmp_path / "out"), pytest.raises(ConfigError, match="another build"):
        build_refmem(cfg)
    empty = tmp_path / "empty.jsonl"
    write_refmem(Corpus((make_dialogue(sessions=1, images=False),)), empty)
    with pytest.raises(DataError, match="no item is left"):
        build_refmem(RefMemConfig(str(empty), str(tmp_path / "none")))
    with pytest.raises(SystemExit):
        parse(RefMemConfig, "", ["--input", "i", "--out", "o", "--questions.formats", "[essay]"])
    assert "formats are single, multi, direct" in capsys.readouterr().err


def test_the_shipped_config_is_taken() -> None:
    path = Path(__file__).parents[2] / "configs" / "refmem.yaml"
    cfg = parse(RefMemConfig, "", ["--config", str(path), "--input", "i", "--out", "o"])
    # what the file spells out are the defaults
    assert cfg == RefMemConfig("i", "o")
