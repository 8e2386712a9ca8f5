"""Work shared out over processes: the same bytes, whoever did what."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from small_corpus import contents

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
    def run(name: str, **more: Any) -> str:
        paths = {"sae": str(minilm_sae), "cache": str(tmp_path / f"{name}-cache")}
        build(BuildStatesConfig(str(corpus), str(tmp_path / name), **paths, **more))
        return capsys.readouterr().out

    run("alone")
    assert "12 questions over 6 dialogues" in run("two", workers=2)
    for part in ("2/3", "1/3"):
        assert f"shard {part} is done" in run("thirds", shard=part)
        assert not (tmp_path / "thirds" / "README.md").exists()
    with pytest.raises(ConfigError, match="holds an unfinished build of other input or settings"):
        run("thirds", limit=1)
    run("thirds", shard="3/3")
    assert "unchanged" in run("thirds", shard="1/3")
    alone, two, thirds = (contents(tmp_path / name) for name in ("alone", "two", "thirds"))
    assert len(alone) >= 8
    assert alone == two == thirds
    with pytest.raises(ConfigError, match="built from other input or settings"):
        run("two", limit=1)
    assert "6 questions over 6 dialogues" in run("two", limit=1, overwrite=True)
    (tmp_path / "diary").mkdir()
    (tmp_path / "diary" / "monday.txt").write_text("dear diary")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="holds no states"):
            run("diary", overwrite=overwrite)
