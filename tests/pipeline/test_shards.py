"""Work shared out over processes: the same bytes, whoever did what."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from forked import Forked
from small_corpus import contents, rows

import remind.pipeline.build
import remind.pipeline.dialogue
from remind.core.errors import ConfigError
from remind.core.files import read_json
from remind.core.processes import Shard, device_of, shard_of
from remind.data.split import SplitConfig
from remind.pipeline import BuildStatesConfig, build_states
from remind.pipeline.outline import STAGES

ARRAY = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "4", "SLURM_ARRAY_TASK_MAX": "10"}


@pytest.mark.parametrize(
    ("text", "environment", "shard"),
    [
        (None, {"RANK": "1", "WORLD_SIZE": "2"}, Shard(0, 1)),
        ("auto", {}, Shard(0, 1)),
        ("auto", {"RANK": "1", "WORLD_SIZE": "4"}, Shard(1, 4)),
        ("auto", {"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, Shard(0, 1)),
        ("3/16", {"RANK": "0", "WORLD_SIZE": "2"}, Shard(2, 16)),
        ("slurm", {"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, Shard(1, 4)),
        ("slurm", {**ARRAY, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, Shard(3, 7)),
        ("slurm", {**ARRAY, "SLURM_ARRAY_TASK_STEP": "3", "SLURM_ARRAY_TASK_COUNT": "3"}, Shard(1, 3)),
    ],
)
def test_a_process_finds_its_part(text: str | None, environment: Mapping[str, str], shard: Shard) -> None:
    assert shard_of(text, environment) == shard


@pytest.mark.parametrize(
    ("text", "environment", "word"),
    [
        ("0/4", {}, "from 1 to n"),
        ("5/4", {}, "from 1 to n"),
        ("-1/4", {}, "from 1 to n"),
        ("second", {}, "auto or slurm"),
        ("slurm", {}, "neither"),
        ("auto", {"RANK": "4", "WORLD_SIZE": "4"}, "not a valid part"),
        ("auto", {"RANK": "x", "WORLD_SIZE": "4"}, "not a valid part"),
        ("slurm", {**ARRAY, "SLURM_ARRAY_TASK_COUNT": "3"}, "name the parts"),
    ],
)
def test_a_part_that_is_none_is_refused(text: str, environment: Mapping[str, str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        shard_of(text, environment)


def test_shards_and_gpus_are_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (1, 3, 7):
        parts = [[n for n in range(20) if Shard(index, count).holds(n)] for index in range(count)]
        assert sorted(number for part in parts for number in part) == list(range(20))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [device_of("cuda", number) for number in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert (device_of("cuda:1", 0), device_of("cpu", 3)) == ("cuda:1", "cpu")


@pytest.mark.slow
def test_the_bytes_do_not_tell_how_the_work_was_shared(
    corpus: Path, minilm_sae: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(name: str, **more: object) -> Path:
        cfg = BuildStatesConfig(
            str(corpus), str(tmp_path / name), sae=str(minilm_sae), cache=str(tmp_path / f"{name}-cache"), **more
        )  # type: ignore[arg-type]
        return build_states(cfg)

    alone = contents(run("alone"))
    assert len(alone) == 7
    capsys.readouterr()
    assert contents(run("two", workers=2)) == alone
    assert "12 questions over 6 dialogues" in capsys.readouterr().out

    for part in ("2/3", "1/3"):
        run("thirds", shard=part)
        assert f"shard {part} is done" in capsys.readouterr().out
        assert not (tmp_path / "thirds").exists()
    run("thirds", shard="3/3")
    assert "12 questions over 6 dialogues" in capsys.readouterr().out
    assert contents(tmp_path / "thirds") == alone
    run("thirds", shard="1/3")
    assert "unchanged" in capsys.readouterr().out


class Recorded:
    """In place of the progress bar."""

    last: Recorded

    def __init__(self, _: str, total: float, percent: bool) -> None:
        self.total, self.skipped, self.steps = total, 0.0, list[tuple[float, str]]()
        type(self).last = self

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self, n: float, note: str) -> None:
        self.steps.append((n, note))

    def skip(self, n: float) -> None:
        self.skipped += n


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_progress_moves_through_the_stages_of_a_dialogue(
    minilm_sae: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(remind.pipeline.build, "ProgressBar", Recorded)
    # one question about a dialogue of several batches, and a short dialogue that is there already
    first, *_ = short = rows(1)
    turns = [{"id": f"t{n}", "speaker": "Ana", "text": f"word {n} " * (1 + n % 5), "images": []} for n in range(300)]
    long = {**first, "id": "long", "sessions": [{"id": "s", "time": None, "turns": turns}]}
    path = tmp_path / "talk.jsonl"

    def run(lines: list[dict[str, object]], out: str, processes: int) -> Recorded:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        options = {"sae": str(minilm_sae), "cache": str(tmp_path / "cache"), "split": SplitConfig(train=1.0, dev=0.0)}
        build_states(BuildStatesConfig(str(path), str(tmp_path / out), workers=processes, **options))  # type: ignore[arg-type]
        return Recorded.last

    few = run(short, "a", 1)
    bar = run([*short, long, {**short[1], "id": "q", "context_id": "long"}], "b", workers)
    assert bar.skipped == few.total
    units = [done for done, _ in bar.steps]
    assert sum(units) + bar.skipped == pytest.approx(bar.total)
    assert min(units) >= 0
    assert max(units) < bar.total / 2
    assert sum(done > 0 for done in units) >= 3
    assert bar.steps[-1][1] == "2 of 2 dialogues"
    if workers == 1:
        stages = list(dict.fromkeys(note for _, note in bar.steps))
        assert stages[:-1] == [f"1 of 2 dialogues, {stage}" for stage in STAGES]
        moved = [note.rpartition(" ")[2] for done, note in bar.steps if done]
        assert {"segments", "cues", "codes", "grounding"} <= set(moved)
        assert moved.count("segments") >= 5


@pytest.mark.slow
def test_processes_of_a_launcher_deal_out_the_dialogues(
    corpus: Path, tmp_path: Path, start: Callable[..., Forked]
) -> None:
    process = start(corpus, tmp_path / "out", tmp_path / "cache", processes=2)
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-2000:]
    assert read_json(tmp_path / "out" / "manifest.json")["counts"]["dialogues"] == 6
    # each built its own three, and nothing twice
    assert len(list((tmp_path / "cache" / "states").rglob("*.parquet"))) == 6
    assert out.count("is done; ") == 1


@pytest.mark.slow
def test_only_what_has_changed_is_built(
    corpus: Path, minilm_sae: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def config(out: str, **more: object) -> BuildStatesConfig:
        paths = {"sae": str(minilm_sae), "cache": str(tmp_path / "cache")}
        return BuildStatesConfig(str(corpus), str(tmp_path / out), **paths, **more)  # type: ignore[arg-type]

    def stamps() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.suffix != ".lock"}

    build_states(config("a"))
    before = stamps()
    with monkeypatch.context() as patch:
        patch.setattr(remind.pipeline.dialogue.DialogueBuilder, "build", lambda *_: pytest.fail("built again"))
        capsys.readouterr()
        build_states(config("a"))
        assert "unchanged" in capsys.readouterr().out
        assert stamps() == before
        # elsewhere, from the cache
        build_states(config("b"))
        assert contents(tmp_path / "a") == contents(tmp_path / "b")
        # other settings are other states, and a damaged folder is not taken for what was built
        with pytest.raises(ConfigError, match="built from other input or settings"):
            build_states(config("b", limit=1))
        (tmp_path / "b" / "part-00000.parquet").write_bytes(b"PAR1")
        with pytest.raises(ConfigError, match="built from other input or settings"):
            build_states(config("b"))
        build_states(config("b", overwrite=True))
        assert contents(tmp_path / "a") == contents(tmp_path / "b")
    # another split: all but the records is there, so nothing is grounded and no backbone is loaded
    monkeypatch.setattr(remind.pipeline.dialogue, "load_backbone", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(
        "remind.llm.offline.OfflineLLM.summaries", lambda *_: pytest.fail("a summary was written again")
    )
    build_states(config("c", split=SplitConfig(train=0.5)))
    assert contents(tmp_path / "a") != contents(tmp_path / "c")
