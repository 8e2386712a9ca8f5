"""Templates of one's own in place of the package's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from in_process import run_module

from remind.core.errors import ConfigError
from remind.data.sample import sample_path
from remind.states import prompts
from remind.states.dataset import load_states, read_manifest


@pytest.fixture(autouse=True)
def ours_again() -> Iterator[None]:
    yield
    prompts.use(None)


def test_a_template_that_was_written_and_changed_is_what_states_are_rendered_with(tmp_path: Path) -> None:
    assert run_module("remind", "prompts", "--out", tmp_path / "own")[0] == 0
    before = {name: prompts.fingerprint(name) for name in prompts.RENDERED}
    written = tmp_path / "own" / "answer.j2"
    written.write_text("MINE {{ format }}\n" + written.read_text("utf-8"), encoding="utf-8")
    words = ("--input", sample_path() / "test.jsonl", "--levels", "[x0]", "--limit", "1", "--cache", tmp_path / "cache")
    for name, more in (("plain", ()), ("own", ("--prompts", tmp_path / "own"))):
        assert run_module("remind", "build-states", *words, "--out", tmp_path / f"states-{name}", *more)[0] == 0
    plain, own = (load_states(tmp_path / f"states-{name}")["test"] for name in ("plain", "own"))
    assert own[0]["x0"]["text"] == f"MINE {own[0]['format']}\n" + plain[0]["x0"]["text"]
    # the hashes of what was changed, and of nothing else
    hashes = {name: read_manifest(tmp_path / f"states-{name}")["prompts"] for name in ("plain", "own")}
    assert hashes["plain"] == before
    assert {name for name in before if hashes["own"][name] != before[name]} == {"answer"}
    # processes started from here use it, too
    code = "from remind.states import prompts; print(prompts.fingerprint('answer'))"
    started = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert started.stdout.strip() == hashes["own"]["answer"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("answer.j2", "{{ colour }}", "no field 'colour'; there are format, letters, no_information, visual"),
        ("ask_cue.j2", "{% block system %}{% endblock %}", "ask_cue.j2: its block 'user' is missing"),
        ("answer.j2", "{% if format %}", "answer.j2:1: "),
        ("answers.j2", "", "answers.j2: there is no template of that name"),
        ("answer.txt", "", "no templates"),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        prompts.use(tmp_path)
    assert said in str(error.value)
    status, _, errors = run_module("remind", "answer", "--prompts", tmp_path, "--model", "nano", "--input", "x.jsonl")
    assert (status, errors) == (2, f"error: --prompts: {error.value}\n")
