"""A folder with links to the checkout and small data, in which commands of the documents are run as they stand.

Sizes are cut by overrides that are added to a command (`RECIPES`), never by leaving out any of its words. What a
command needs under runs/ and is not there is made first, by the command of the documents that makes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from doc_commands import ROOT, Command, all_commands
from doc_server import reply
from fault_proxy import Proxy
from fuzzing import seeds
from in_process import run_module
from remembering import locomo_file

from remind import read
from remind.core.files import write_rows
from remind.data.sample import sample_path
from remind.refmem.items import read_items
from remind.refmem.merge import Row
from remind.train_sae import TrainSAEConfig
from remind.train_sae import run as quick

#: What makes a command end in seconds, added to whatever its line says.
RECIPES: dict[str, str] = {
    "annotate-refmem": "",
    "answer": "--max_new_tokens 4",
    "build-refmem": "--limit 2 --questions.per_cluster 1 --questions.formats '[single]' --filters.blind_draws 1",
    "build-states": "--limit 2 --workers 1",
    "check-sae": "--limit 20 --loss_windows 1",
    "check-states": "--model nano --split test --questions 2",
    "compare": "",
    "compare-models": "--limit 2 --resamples 20",
    "demo": "--world.train 1 --world.dev 1 --world.test 1 --world.sessions 2 --world.evidence '[1, 1]' "
    "--world.contrary '[0, 1]' --world.second_voice 0 --trainer.max_steps 2 --trainer.eval_steps 2 "
    "--trainer.batch_size 4 --built.layers '[2]' --built.sae.steps 5 --built.sae.d_sae 128 --built.sae.k 8 "
    "--built.sae.batch_size 128 --built.talk 2 --workers 1",
    "evaluate": "--limit 2 --max_new_tokens 2 --bootstrap 20 --device cpu --dtype float32",
    "export": "",
    "feature-pages": "--limit 2 --most 5",
    "inspect": "--per_feature 1 --features 2 --limit 2 --max_new_tokens 4",
    "make-world": "--world.train 1 --world.dev 1 --world.test 1",
    "merge-annotations": "",
    "plot-run": "",
    "prompts": "",
    "run-memory": "--dialogues 1 --limit 2 --k '[5]' --budgets '[800]'",
    "score-memory": "--resamples 20",
    "train-memory": "--world.dialogues 2 --world.sessions 2 --world.evaluate 1 --steps 1 --batch_size 2",
    "train-pra": "--trainer.max_steps 1 --data.eval_limit 1 --data.max_decoded 4",
    "train-sae": "--trainer.d_sae 256 --trainer.steps 2 --trainer.batch_size 64 --buffer_tokens 4096 "
    "--idf_turns 20 --loss_windows 1 --windows_per_batch 2",
}
#: The same for what one config asks for beyond that: servers, and a model that has a test of its own.
BY_CONFIG = {
    "configs/refmem.yaml": "--llm.questions.base_url {url} --llm.answer.base_url {url}",
    "configs/pra_evidence.yaml": "--model nano",
    "configs/sft_smollm2.yaml": "--model nano",
}
#: Options that name what is written, not read.
_WRITTEN = ("--out", "--cache", "--llm.dry_run")
DEMO = Command("Makefile", "remind demo --out runs/demo")


def lay_out(folder: Path) -> None:
    """The data files that the documents name."""
    corpus = read(sample_path() / "train.jsonl")
    said = [[turn.text for turn in session.turns] for session in corpus.dialogues[0].sessions[:2]]
    asked = [
        {"question": "What was said?", "answer": said[n][0], "evidence": [f"D{n + 1}:1"], "category": category}
        for category, n in enumerate((0, 1, 0, 1), 1)
    ]
    for name in ("realtalk", "msc", "friends"):
        (folder / name).mkdir()
    locomo_file(folder / "locomo10.json", "abcd", said, asked)
    # what it is is recognised from the content
    locomo_file(folder / "realtalk" / "chats.json", "ef", said, asked)
    (folder / "msc" / "session_3_valid.jsonl").write_bytes(seeds.as_lines(seeds.MSC * 8))
    (folder / "friends" / "emorynlp_dev_final.csv").write_text(seeds.FRIENDS, encoding="utf-8")
    (folder / "texts.txt").write_text("Ana drinks coffee.\nBen drinks tea in the morning.\n" * 4, encoding="utf-8")


class Desk:
    """Runs commands in `folder`; what was run once is not run again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._done: dict[tuple[object, ...], str] = {}
        for name in ("scripts", "configs", "remind"):
            (folder / name).symlink_to(ROOT / name)
        lay_out(folder)

    def run(self, command: Command) -> str:
        """What the command printed; fails the test where it ends with an error."""
        if command.split not in self._done:
            for path in self._needs(command):
                self.provide(path, command)
            if command.program == "merge-annotations":
                self._annotate(command)
            self._done[command.split] = self._start(command)
        return self._done[command.split]

    def _needs(self, command: Command) -> Iterator[str]:
        """Paths under runs/ that the command or its config reads."""
        words, config = command.arguments, command.option("--config")
        for before, word in zip(("", *words), words, strict=False):
            if before not in _WRITTEN:
                yield from re.findall(r"runs/[\w./-]+", word)
        for name, value in _settings(config).items():
            if name != "out" and f"--{name}" not in words and str(value).startswith("runs/"):
                yield str(value)

    def provide(self, path: str, wanted_by: object) -> None:
        """Have `path` made, where it is not there."""
        if (self.folder / path).exists():
            return
        maker = next((one for one in (*all_commands(), DEMO) if one != wanted_by and _makes(one, path)), None)
        if maker is None:
            pytest.fail(f"{wanted_by}: no command of the documents makes {path}")
        self.run(maker)
        assert (self.folder / path).exists(), f"{wanted_by}: {maker} does not write {path}"

    def _start(self, command: Command) -> str:
        with Proxy(answer=reply) as server, self._surroundings():
            added = f"{RECIPES[str(command.program)]} {BY_CONFIG.get(command.option('--config') or '', '')}"
            words = [*command.arguments, *shlex.split(added.replace("{url}", server.url))]
            if command.words[:2] == ("accelerate", "launch"):
                front = command.words[: -len(command.arguments)]
                line = [sys.executable, "-m", "accelerate.commands.accelerate_cli", *front[1:], *words]
                done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
                status, output, errors = done.returncode, done.stdout, done.stderr
            else:
                # much faster than a process of its own, which imports torch and transformers anew
                status, output, errors = run_module("remind", command.program, *words)
        if status:
            pytest.fail(f"{command}\nended with {status}: {errors[-3000:]}", pytrace=False)
        return output

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        """The folder, a home of its own, a key, one process, and small sizes where no option sets them."""
        own = {"HOME": str(self.folder / "home"), "OPENAI_API_KEY": "sk-made-up", "OMP_NUM_THREADS": "1"}
        shorter = (*(quick.quick_sae.__defaults__ or ())[:-1], 1)

        def fewer(*args: Any, **fields: Any) -> TrainSAEConfig:
            return TrainSAEConfig(*args, **{**fields, "limit": 250, "buffer_tokens": 4096})

        with (
            contextlib.chdir(self.folder),
            mock.patch("remind.demo.spawned_pool", _Here),
            mock.patch.dict(os.environ, own),
            mock.patch.object(quick.quick_sae, "__defaults__", shorter),
            mock.patch.object(quick, "TrainSAEConfig", fewer),
        ):
            yield

    def _annotate(self, command: Command) -> None:
        """What annotators would hand in: everybody agrees with the drafts."""
        items = read_items(self.folder / str(command.option("--drafts")))
        for name in ("Ana", "Ben", "Cem"):
            rows = [
                Row(item.id, name, item.answers, item.evidence, item.images, confidence=5, fingerprint=item.fingerprint)
                for item in items
            ]
            path = self.folder / str(command.option("--annotations")) / f"annotations_{name}.jsonl"
            write_rows(path, map(asdict, rows))


class _Here(Executor):
    """In place of a pool of processes, each of which would import everything anew."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, work: Any, /, *words: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*words, **named))
        return done


def _settings(config: str | None) -> dict[str, Any]:
    return {} if config is None else yaml.safe_load((ROOT / config).read_text(encoding="utf-8")) or {}


def _makes(command: Command, path: str) -> bool:
    out = command.option("--out") or _settings(command.option("--config")).get("out")
    return command.program in RECIPES and "--llm.dry_run" not in command.words and f"{path}/".startswith(f"{out}/")
