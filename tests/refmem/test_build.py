"""One command from dialogues to a benchmark: killed and resumed, changed, with annotations, and of the other styles."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import chat_samples  # noqa: F401  skips without the extra llm
import pytest
from fault_proxy import Proxy, completion
from forked import Forked
from refmem_samples import talk
from scripted_chat import value_for

from remind.core.errors import ConfigError, DataError
from remind.core.files import read_json
from remind.data.dialogue import DIMENSIONS, Corpus
from remind.data.readers import read, write_refmem
from remind.data.split import SplitConfig, assign_splits
from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.refmem.build import build_refmem
from remind.refmem.config import STAGES, FilterConfig, ItemsConfig, P13nConfig, RefMemConfig
from remind.refmem.items import read_items, write_items
from remind.refmem.styles import KINDS

Capture = pytest.CaptureFixture[str]
KILLED = """
import os, signal, sys
from remind.refmem import build
from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.refmem.config import FilterConfig, ItemsConfig, RefMemConfig

def dying(path, items):
    path.write_text("half a line")
    os.kill(os.getpid(), signal.SIGKILL)

build.write_items = dying
llm = LLMConfig(EndpointConfig("m", sys.argv[3]), cache=None)
small = {"questions": ItemsConfig(per_cluster=1), "filters": FilterConfig(blind_draws=1)}
build.build_refmem(RefMemConfig(sys.argv[1], sys.argv[2], llm=llm, **small))
"""


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    """A server that writes valid items and guesses none of them."""

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        system, user = (message["content"] for message in body["messages"])
        return 200, {}, completion(json.dumps(value_for(system, user)))

    with Proxy(answer=answer) as proxy:
        yield proxy


def done(cfg: RefMemConfig, capsys: Capture) -> list[str]:
    """The stages that a build has run."""
    capsys.readouterr()
    build_refmem(cfg)
    return re.findall(r"^(\w+) +done", capsys.readouterr().out, re.MULTILINE)


@pytest.fixture
def cfg(tmp_path: Path, server: Proxy) -> RefMemConfig:
    path, llm = str(tmp_path / "dialogues.jsonl"), LLMConfig(EndpointConfig("m", server.url), cache=None)
    write_refmem(Corpus((talk(sessions=6),)), path)
    small: dict[str, Any] = {"questions": ItemsConfig(per_cluster=1), "filters": FilterConfig(blind_draws=1)}
    return RefMemConfig(path, str(tmp_path / "out"), llm=llm, **small)


def test_killed_and_resumed_it_gives_the_same_bytes(cfg: RefMemConfig, tmp_path: Path, capsys: Capture) -> None:
    broken, script = tmp_path / "broken", tmp_path / "killed.py"
    result = build_refmem(cfg)
    script.write_text(KILLED)
    assert Forked(script, cfg.input, broken, cfg.llm.default.base_url).wait(300) == -signal.SIGKILL
    # nothing half-written under a stage's name
    assert [name for name in STAGES if (broken / name).exists()] == ["clusters"]
    assert done(replace(cfg, out=str(broken)), capsys) == [*STAGES[1:]]
    assert files(broken) == files(tmp_path / "out")

    # what came out is the toolkit's own format, split as it says
    benchmark = read(result)
    assert benchmark.dialogues == read(cfg.input).dialogues
    assert {question.dimension for question in benchmark.questions} == set(DIMENSIONS)
    assert assign_splits(benchmark.questions, SplitConfig()) == {one.id: one.split for one in benchmark.questions}
    assert read_json(tmp_path / "out/benchmark/statistics.json")["questions"]["total"] == len(benchmark.questions)


def test_a_changed_setting_redoes_what_hangs_on_it(cfg: RefMemConfig, tmp_path: Path, capsys: Capture) -> None:
    assert done(cfg, capsys) == list(STAGES)
    assert done(cfg, capsys) == []
    assert done(replace(cfg, filters=replace(cfg.filters, blind_draws=0)), capsys) == ["filtered", "benchmark"]
    shown = replace(cfg, questions=replace(cfg.questions, images="pixels"), until="items")
    assert done(shown, capsys) == ["items"]
    path = Path(cfg.input)  # type: ignore[arg-type]
    path.write_text(path.read_text().replace("the pottery", "the ceramics"))
    assert done(replace(cfg, until="clusters"), capsys) == ["clusters"]
    build_refmem(cfg)

    # annotators' items take the place of the filtered ones; of another build they are refused
    kept, final = read_items(tmp_path / "out" / "filtered" / "items.jsonl"), tmp_path / "final.jsonl"
    write_items(final, kept[::2])
    result = build_refmem(replace(cfg, adjudicated=str(final)))
    assert {question.id for question in read(result).questions} == {item.id for item in kept[::2]}
    write_items(final, [replace(kept[0], cluster_id="talk/text-999")])
    with pytest.raises(DataError, match=kept[0].id):
        build_refmem(replace(cfg, adjudicated=str(final)))


def test_personal_questions_are_a_style(cfg: RefMemConfig) -> None:
    cfg = replace(cfg, style="p13n")
    corpus = read(build_refmem(cfg))
    assert corpus.dialogues == read(cfg.input).dialogues
    assert [question.category for question in corpus.questions] == [*KINDS] * 2
    cut = read(build_refmem(replace(cfg, p13n=P13nConfig(episode_turns=8))))
    assert [len(dialogue.turns) for dialogue in cut.dialogues] == [8] * 4


def test_without_a_chat_model_it_says_what_to_set(cfg: RefMemConfig, tmp_path: Path) -> None:
    out, writer = tmp_path / "out", LLMConfig(questions=EndpointConfig("m", "local"), cache=None)
    for llm, message in ((LLMConfig(), r"needs llm\.questions"), (writer, r"needs llm\.answer .* or filters")):
        with pytest.raises(ConfigError, match=message):
            build_refmem(replace(cfg, llm=llm))
    # nothing was begun; the first stage needs no chat model
    assert not out.exists()
    assert build_refmem(replace(cfg, llm=LLMConfig(), until="clusters")) == out / "clusters"
