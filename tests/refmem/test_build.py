"""One command from dialogues to a benchmark: killed and resumed, changed, without images, and with annotations."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import chat_samples  # noqa: F401  skips without the extra llm
import pytest
from fault_proxy import Proxy, completion
from forked import Forked
from scripted_chat import value_for

from remind.core.errors import ConfigError, DataError
from remind.core.files import read_json
from remind.core.run_folder import RunFolder
from remind.data.dialogue import DIMENSIONS, TEXT_DIMENSIONS, Corpus, Dialogue
from remind.data.readers import read, write_refmem
from remind.data.split import SplitConfig, assign_splits, check_overlap
from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.refmem.build import Build, build_refmem, open_corpus
from remind.refmem.config import STAGES, FilterConfig, ItemsConfig, RefMemConfig
from remind.refmem.items import read_items, write_items

KILLED = """
import os, signal, sys
from remind.refmem import build
from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.refmem.config import RefMemConfig

def dying(path, items):
    path.write_text("half a line")
    os.kill(os.getpid(), signal.SIGKILL)

build.write_items = dying
llm = LLMConfig(EndpointConfig("m", sys.argv[3]), cache=None)
build.build_refmem(RefMemConfig(sys.argv[1], sys.argv[2], llm=llm))
"""


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def dialogues(tmp_path: Path, corpus: Corpus) -> str:
    path = tmp_path / "dialogues.jsonl"
    write_refmem(corpus, path)
    return str(path)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that writes valid items and guesses none of them."""

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        system, user = (message["content"] for message in body["messages"])
        return 200, {}, completion(json.dumps(value_for(system, user)))

    with Proxy(answer=answer) as proxy:
        yield proxy.url


@pytest.fixture
def config(url: str) -> Callable[..., RefMemConfig]:
    """Settings of a build that asks the server."""
    llm = LLMConfig(EndpointConfig("m", url), cache=None)

    def make(path: object, out: Path, **settings: Any) -> RefMemConfig:
        small = {"questions": ItemsConfig(per_cluster=1), "filters": FilterConfig(blind_draws=1)}
        return RefMemConfig(str(path), str(out), llm=llm, **{**small, **settings})

    return make


def test_killed_and_resumed_it_gives_the_same_bytes(
    dialogues: str, tmp_path: Path, corpus: Corpus, config: Callable[..., RefMemConfig], url: str
) -> None:
    whole = tmp_path / "whole"
    result = build_refmem(config(dialogues, whole))
    broken = tmp_path / "broken"
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    assert Forked(script, dialogues, broken, url).wait(300) == -signal.SIGKILL
    # nothing half-written under a stage's name
    assert [name for name in STAGES if (broken / name).exists()] == ["clusters"]
    assert any(path.name.endswith(".tmp") for path in broken.iterdir())
    build = Build(config(dialogues, broken), corpus)
    with RunFolder(broken).held():
        build.run()
    assert [name for name, stage in build.done.items() if stage.reused] == ["clusters"]
    assert files(broken) == files(whole)

    # what came out is the toolkit's own format, split as it says
    benchmark = read(result)
    assert benchmark.dialogues == corpus.dialogues
    assert not benchmark.dangling
    assert {question.dimension for question in benchmark.questions} == set(DIMENSIONS)
    assert assign_splits(benchmark.questions, SplitConfig()) == {
        question.id: question.split for question in benchmark.questions
    }
    rows = ((q.id, q.dialogue_id, q.split, (*q.evidence, *q.images)) for q in benchmark.questions)
    check_overlap(rows, lambda _: result)
    counts = read_json(whole / "benchmark" / "statistics.json")
    assert counts["questions"]["total"] == len(benchmark.questions)
    assert counts["filters"]["in"] == counts["filters"]["kept"] + sum(counts["filters"]["removed"].values())


def test_a_changed_setting_redoes_what_hangs_on_it(
    dialogues: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], config: Callable[..., RefMemConfig]
) -> None:
    cfg = config(dialogues, tmp_path / "out")

    def done(cfg: RefMemConfig) -> list[str]:
        build = Build(cfg, open_corpus(cfg))
        build.run()
        return [name for name, stage in build.done.items() if not stage.reused]

    assert done(cfg) == list(STAGES)
    assert done(cfg) == []
    assert done(replace(cfg, train=0.5)) == ["benchmark"]
    assert done(replace(cfg, filters=replace(cfg.filters, blind_draws=0))) == ["filtered", "benchmark"]
    few = replace(cfg, questions=replace(cfg.questions, formats=["single", "direct"]))
    assert done(few) == ["items", "filtered", "benchmark"]
    talk = Path(dialogues)
    talk.write_text(talk.read_text().replace("the pottery", "the ceramics"))
    assert done(few) == list(STAGES)

    # annotators' items take the place of the filtered ones; of another build they are refused
    kept = read_items(tmp_path / "out" / "filtered" / "items.jsonl")
    final = tmp_path / "final.jsonl"
    write_items(final, kept[::2])
    result = build_refmem(replace(few, adjudicated=str(final)))
    assert {question.id for question in read(result).questions} == {item.id for item in kept[::2]}
    assert f"benchmark: {result}" in capsys.readouterr().out
    before = files(tmp_path / "out" / "benchmark")
    for strange in (replace(kept[0], cluster_id="talk/text-999"), replace(kept[0], evidence=("D77:1",), images=())):
        write_items(final, [strange])
        with pytest.raises(DataError, match=kept[0].id):
            build_refmem(replace(few, adjudicated=str(final)))
    with pytest.raises(DataError, match="no such file"):
        build_refmem(replace(few, adjudicated=str(tmp_path / "nowhere.jsonl")))
    assert files(tmp_path / "out" / "benchmark") == before


def test_small_inputs_and_what_cannot_be_built(
    tmp_path: Path,
    make_dialogue: Callable[..., Dialogue],
    capsys: pytest.CaptureFixture[str],
    config: Callable[..., RefMemConfig],
) -> None:
    path = tmp_path / "one.jsonl"
    write_refmem(Corpus((make_dialogue(images=False),)), path)
    benchmark = read(build_refmem(config(path, tmp_path / "out")))
    assert {question.dimension for question in benchmark.questions} <= set(TEXT_DIMENSIONS)
    assert {question.split for question in benchmark.questions} == {"train", "test"}
    assert "no items for:" in capsys.readouterr().out
    with (
        RunFolder(tmp_path / "out").held(),
        pytest.raises(ConfigError, match=f"process {os.getpid()} on .* at work"),
    ):
        build_refmem(config(path, tmp_path / "out"))
    write_refmem(Corpus((make_dialogue(sessions=1, images=False),)), path)
    with pytest.raises(DataError, match="no item is left"):
        build_refmem(config(path, tmp_path / "none"))
    with pytest.raises(ConfigError, match="formats are single, multi, direct"):
        ItemsConfig(formats=["essay"])


def test_without_a_chat_model_it_says_what_to_set(dialogues: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"set llm\.questions or llm\.default \(model, and base_url"):
        build_refmem(RefMemConfig(dialogues, str(out)))
    writer = LLMConfig(questions=EndpointConfig("m", "local"), cache=None)
    with pytest.raises(ConfigError, match=r"set llm\.answer or llm\.default .* or filters\.blind_draws 0"):
        build_refmem(RefMemConfig(dialogues, str(out), llm=writer))
    # nothing was begun; the first stage needs no chat model
    assert not out.exists()
    assert build_refmem(RefMemConfig(dialogues, str(out), until="clusters")) == out / "clusters"
