"""Work shared out over processes: the same bytes, whoever did what."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest
from small_corpus import contents

import remind.build.states
from remind.build import BuildStatesConfig, build
from remind.build.plan import shard_of
from remind.core.errors import ConfigError
from remind.core.processes import Shard


@pytest.mark.parametrize(
    ("text", "environment", "shard"),
    [
        (None, {"RANK": "1", "WORLD_SIZE": "2"}, Shard(0, 1)),
        ("auto", {"RANK": "1", "WORLD_SIZE": "4"}, Shard(1, 4)),
        ("3/16", {"RANK": "0", "WORLD_SIZE": "2"}, Shard(2, 16)),
        ("auto", {}, Shard(0, 1)),
        ("0/4", {}, "from 1 to n"),
    ],
)
def test_a_process_finds_its_part(text: str | None, environment: Mapping[str, str], shard: Shard | str) -> None:
    with pytest.raises(ConfigError, match=shard) if isinstance(shard, str) else nullcontext():
        assert shard_of(text, environment) == shard


@pytest.mark.slow
def test_the_states_do_not_tell_how_the_work_was_shared(
    corpus: Path, minilm_sae: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(name: str, **more: object) -> Path:
        paths = {"sae": str(minilm_sae), "cache": str(tmp_path / f"{name}-cache")}
        return build(BuildStatesConfig(str(corpus), str(tmp_path / name), **paths, **more))  # type: ignore[arg-type]

    alone = contents(run("alone"))
    assert len(alone) >= 8
    capsys.readouterr()
    assert contents(run("two", workers=2)) == alone
    assert "12 questions over 6 dialogues" in capsys.readouterr().out

    for part in ("2/3", "1/3"):
        run("thirds", shard=part)
        assert f"shard {part} is done" in capsys.readouterr().out
        assert not (tmp_path / "thirds" / "README.md").exists()
    run("thirds", shard="3/3")
    assert "12 questions over 6 dialogues" in capsys.readouterr().out
    assert contents(tmp_path / "thirds") == alone
    run("thirds", shard="1/3")
    assert "unchanged" in capsys.readouterr().out


def test_a_folder_is_gone_on_with_by_the_same_build_alone(
    corpus: Path, minilm_sae: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = remind.build.states.DialogueBuilder.build
    built: list[int] = []

    def config(**more: object) -> BuildStatesConfig:
        paths = {"sae": str(minilm_sae), "cache": str(tmp_path / "cache")}
        return BuildStatesConfig(str(corpus), str(tmp_path / "out"), **paths, **more)  # type: ignore[arg-type]

    def third_fails(builder: remind.build.states.DialogueBuilder, task: remind.build.states.Task) -> None:
        if len(built) == 2:
            raise KeyboardInterrupt
        built.append(task.number)
        real(builder, task)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(remind.build.states.DialogueBuilder, "build", third_fails)
        build(config())
    with pytest.raises(ConfigError, match="holds an unfinished build of other input or settings"):
        build(config(limit=1))
    with monkeypatch.context() as patch:
        patch.setattr(remind.build.states.DialogueBuilder, "build", lambda b, t: built.append(t.number) or real(b, t))
        build(config())
        assert built == [0, 1, 2, 3, 4, 5]
        capsys.readouterr()
        build(config())
        assert "unchanged" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="built from other input or settings"):
        build(config(limit=1))
    build(config(limit=1, overwrite=True))
    assert "6 questions over 6 dialogues" in capsys.readouterr().out
    (tmp_path / "diary").mkdir()
    (tmp_path / "diary" / "monday.txt").write_text("dear diary")
    for more in ({}, {"overwrite": True}):
        cfg = BuildStatesConfig(str(corpus), str(tmp_path / "diary"), sae=str(minilm_sae), **more)
        with pytest.raises(ConfigError, match="holds no states"):
            build(cfg)
