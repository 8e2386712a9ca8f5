"""A folder with links to the checkout and small data, in which the commands of the documents are run as they stand.

Sizes are cut by overrides that are added to a command (`RECIPES`), never by leaving out any of its words. A command
whose program has no recipe fails. What a command needs under runs/ and is not there is made first, by the command of
the documents that makes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import doc_data
import pytest
import yaml
from doc_commands import ROOT, Command, block_commands
from doc_server import reply
from fault_proxy import Proxy
from in_process import run_module

from remind.commands import COMMANDS
from remind.core.files import write_rows

_WORLD = "--{0}.train 1 --{0}.dev 1 --{0}.test {1}"
#: Few turns to a dialogue. Retrieval keeps a dialogue so short whole where it is not told otherwise.
_SHORT = "--{0}.sessions 2 --{0}.contrary '[0, 1]' --{0}.second_voice 0"
_PART = "--{0}.perception.retrieve.whole_tokens 0"
_BENCH = f"{_WORLD.format('bench.world', 1)} {_SHORT.format('bench.world')} --workers 0 --steps 1"
_BENCH += " --bench.upper 4 --bench.watched 0"
#: What makes a program end in seconds, added to whatever a command says.
RECIPES: dict[str, str] = {
    "benchmarks.count_files": "",
    "benchmarks.gpu": "",
    "annotate-refmem": "",
    "build-refmem": "--limit 2 --questions.per_cluster 1 --questions.formats '[single]' --filters.blind_draws 1",
    # what several processes do is tested with the pipeline
    "build-states": "--limit 2 --workers 1",
    "check-sae": "--limit 20 --loss_windows 1",
    "compare": "",
    "compare-models": "--limit 2 --resamples 20",
    # two dialogues of test: experiments.inside chooses on one and counts on the other
    "demo": f"{_WORLD.format('world', 2)} --trainer.max_steps 16 --trainer.eval_steps 16 --trainer.batch_size 4"
    " --built.layers '[2]' --built.sae.steps 5 --built.sae.d_sae 128 --built.sae.k 8 --built.sae.batch_size 128"
    " --built.talk 2 --workers 1",
    "evaluate": "--limit 2 --max_new_tokens 2 --bootstrap 20 --device cpu --dtype float32",
    "export": "",
    "feature-pages": "--limit 2 --most 5",
    "inspect": "--per_feature 1 --features 2",
    "make-world": _WORLD.format("world", 1),
    "merge-annotations": "",
    "plot-run": "",
    "run-memory": "--dialogues 1 --limit 2 --k '[5]' --budgets '[800]'",
    "score-memory": "--resamples 20",
    "train-memory": "--world.dialogues 2 --world.sessions 2 --world.evaluate 1 --steps 1 --batch_size 2",
    "train-pra": "--trainer.max_steps 1 --data.eval_limit 1 --data.max_decoded 4",
    "train-sae": "--trainer.d_sae 256 --trainer.steps 2 --trainer.batch_size 64 --buffer_tokens 4096 "
    "--idf_turns 20 --loss_windows 1 --windows_per_batch 2",
    "experiments.chain": "--build.limit 8 --questions 2 --test_questions 2 --sft_steps 2 --pra_steps 2 --folds 2 "
    "--only_folds '[0]' --dev_dialogues 0 --pool same --trace_every 0 --arms '[pra]' --probes '[]' "
    "--max_new_tokens 16 --resamples 200",
    "experiments.cost": "--lengths '[2048]' --model nano --auxiliary nano --sae_layers '[1, 3]'",
    "experiments.evidence": "--limit 1",
    "experiments.inside": "--limit 60 --ks '[4]' --draws 1 --resamples 20",
    "experiments.official.agreement": "",
    "experiments.official.export": "",
    "experiments.official.retrieval": "--bootstrap 20",
    "experiments.official.score": "--bootstrap 20",
    "experiments.paper": f"--world.test 1 {_SHORT.format('world')} {_PART.format('built')} --built.sae.steps 2"
    " --built.sae.d_sae 32 --built.talk 1 --resamples 20",
    "experiments.policies": "--seeds '[1]' --arms '[adrpo]' --dialogues 2 --resamples 100 --sft.steps 1 --rl.steps 1 "
    "--sft.world.dialogues 2 --sft.world.evaluate 1 --rl.world.dialogues 2 --rl.world.evaluate 1 --rl.batch_size 1",
    "experiments.pretrain": "--steps 2 --lessons 40 --batch 2 --hidden_size 32 --layers 2 --threads 1",
    "experiments.proof": f"{_BENCH} --arms '{{sft: [clean]}}' --choose.conditions '[clean]' --choose.grids '{{}}' "
    "--seeds '[1]' --resamples 100",
}
#: What training all weights in bfloat16 takes needs torchao.
_WIDE = "--dtype float32 --trainer.optim adamw_torch_fused"
SMALLER = ("2b_lora", "4b_lora", "4b_qlora")
#: The same for what one config asks for beyond the script's recipe: GPUs, servers.
BY_CONFIG: dict[str, str] = {
    "build_openai": "--llm.cues.base_url {url} --llm.strategy.base_url {url} --llm.summary.base_url {url}",
    "proof_built": f"--arms '{{sft: [clean/marks-built]}}' {_PART.format('bench.built')} --bench.built.sae.steps 2"
    " --bench.built.sae.d_sae 64 --bench.built.talk 2",
    "build_server": "--llm.default.base_url {url}",
    "feature_names": "--llm.explain.base_url {url}",
    "memory": "--llm.default.base_url {url}",
    "refmem": "--llm.questions.base_url {url} --llm.answer.base_url {url}",
    "evaluate_server": "--llm.answer.base_url {url} --llm.judge.base_url {url}",
    # which is not installed; its stand-in has tests of its own
    "evaluate_vllm": "--answers local",
    # the real model has a test of its own
    "sae_smollm2": "--backbone nano --layers '[1, 2]' --window 128",
    "pra_smollm2": "--model nano",
    "chain_smollm2": "--model nano --build.backbone minilm --build.sae null",
    **dict.fromkeys(
        ("paper/sae", "sae_qwen3_vl_2b", "sae_qwen3_vl_4b"),
        "--device cpu --dtype float32 --window 128 --trainer.tokens null --trainer.init_tokens 256",
    ),
    **dict.fromkeys(
        (*(f"paper/pra_{kind}" for kind in ("full", "lora", "qlora")), *(f"pra_qwen3_vl_{kind}" for kind in SMALLER)),
        "--data.limit 2",
    ),
    "paper/pra_full": f"--data.limit 2 {_WIDE}",
    # vLLM is not installed
    **dict.fromkeys(
        ("memory/membuilder_sft_qwen3_4b", "memory/adrpo_qwen3_4b", "memory/salimory_llama32_3b"),
        "--rl.vllm off --rl.group 2 --rl.reply_tokens 8 --llm.default.base_url {url} --llm.default.model m",
    ),
    "paper/build": "--device cpu --dtype float32 --llm.cues.base_url {url} --llm.strategy.base_url {url} "
    "--llm.summary.base_url {url}",
    "paper/evaluate": "--llm.judge.base_url {url}",
    "paper/evaluate_base": "--answers local --llm.judge.base_url {url} --llm.summary.base_url {url}",
}
#: The launcher that is used, once; in one process with others a run takes a tenth of the time. The other launchers want
#: GPUs: their commands are run alone, and the file is only read.
LAUNCHED = ("train-pra", "configs/accelerate/cpu_2.yaml")
#: Where a reader is to put something of their own.
PLACEHOLDERS = {"<id>": "c01-q000"}
#: Options that name what is written, not read.
_WRITTEN = ("--out", "--cache", "--llm.dry_run")


class Desk:
    """Runs commands in `folder`; what was run once is not run again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._done: dict[tuple[object, ...], str] = {}
        for name in ("scripts", "configs", "remind", "experiments"):
            (folder / name).symlink_to(ROOT / name)
        doc_data.lay_out(folder)

    def run(self, command: Command) -> str:
        """What the command printed; fails the test where it ends with an error."""
        key = (command.program, command.arguments)
        if key not in self._done:
            for path in self._needs(command):
                self._provide(path, command)
            if command.program == "merge-annotations":
                self._annotate(command)
            self._done[key] = self._start(command)
        return self._done[key]

    def arguments(self, command: Command, url: str = "") -> list[str]:
        """The command's arguments and its recipe's."""
        program = command.program
        if program is None or program not in RECIPES:
            pytest.fail(f"{command}: no recipe for {program}; say in RECIPES how it is made small")
        config = (command.config or "").removeprefix("configs/").removesuffix(".yaml")
        added = f"{RECIPES[program]} {BY_CONFIG.get(config, '')}".replace("{url}", url)
        return [*(PLACEHOLDERS.get(word, word) for word in command.arguments), *shlex.split(added)]

    def _needs(self, command: Command) -> Iterator[str]:
        """Paths under runs/, or the model, that the command or its config reads."""
        words = command.arguments
        for before, word in zip(("", *words), words, strict=False):
            if before not in _WRITTEN:
                yield from re.findall(r"runs/[\w./-]+", word)
        config = (ROOT / command.config).read_text(encoding="utf-8") if command.config else ""
        for name, value in (yaml.safe_load(config) or {}).items():
            if name != "out" and f"--{name}" not in words and str(value).startswith("runs/"):
                yield str(value)
        yield from (name for name in doc_data.HUB_MODELS if name in command.text + config)

    def _provide(self, path: str, wanted_by: Command) -> None:
        """Have `path` made, where it is not there."""
        if (self.folder / path).exists():
            return
        if path in doc_data.HUB_MODELS:
            doc_data.lay_out_model(self.folder, path)
            return
        makers = (one for one in (*block_commands(), DEMO) if one != wanted_by and _makes(one, path))
        maker = next(makers, None)
        if maker is None:
            pytest.fail(f"{wanted_by}: no command of the documents makes {path}")
        self.run(maker)
        assert (self.folder / path).exists(), f"{wanted_by}: {maker} does not write {path}"

    def _start(self, command: Command) -> str:
        with Proxy(answer=reply) as server, self._surroundings():
            words = self.arguments(command, server.url)
            if (command.program, command.option("--config_file")) == LAUNCHED:
                return _as_process(command, words)
            return _in_process(command, words)

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        """The folder, a home of its own, a key, and small sizes where no option sets them."""
        from experiments.pretrain import run as pretraining
        from remind.train_sae import TrainSAEConfig
        from remind.train_sae import run as quick

        own = {"HOME": str(self.folder / "home"), "OPENAI_API_KEY": "sk-made-up"}
        shorter = (*(quick.quick_sae.__defaults__ or ())[:-1], 1)

        def fewer(*args: Any, **fields: Any) -> TrainSAEConfig:
            return TrainSAEConfig(*args, **{**fields, "limit": 250, "buffer_tokens": 4096})

        worlds = {name: replace(world, test=1) for name, world in pretraining.MEASURED.items()}
        with (
            contextlib.chdir(self.folder),
            mock.patch("concurrent.futures.ProcessPoolExecutor", _here),
            mock.patch.object(pretraining, "MEASURED", worlds),
            mock.patch.dict(os.environ, own),
            mock.patch.object(quick.quick_sae, "__defaults__", shorter),
            mock.patch.object(quick, "TrainSAEConfig", fewer),
        ):
            yield

    def _annotate(self, command: Command) -> None:
        """What annotators would hand in: everybody agrees with the drafts."""
        from remind.refmem.items import read_items
        from remind.refmem.merge import Row

        items = read_items(self.folder / str(command.option("--drafts")))
        for name in ("Ana", "Ben", "Cem"):
            rows = [
                Row(item.id, name, item.answers, item.evidence, item.images, confidence=5, fingerprint=item.fingerprint)
                for item in items
            ]
            path = self.folder / str(command.option("--annotations")) / f"annotations_{name}.jsonl"
            write_rows(path, map(asdict, rows))


DEMO = Command("Makefile", "remind demo")


def output_of(command: Command) -> str | None:
    """The path a command writes: --out, or its config's."""
    if command == DEMO:
        return "runs/demo"
    config = yaml.safe_load((ROOT / command.config).read_text(encoding="utf-8")) if command.config else {}
    return (command.option("--out") or config.get("out")) if command.program else None


def _here(*_: object, **__: object) -> ThreadPoolExecutor:
    """In place of a pool of processes, each of which would import everything anew."""
    return ThreadPoolExecutor(1)


def _makes(command: Command, path: str) -> bool:
    out = output_of(command)
    dry = "--llm.dry_run" in command.words
    return out is not None and not dry and f"{path}/".startswith(f"{out}/")


def _in_process(command: Command, words: list[str]) -> str:
    """Much faster than a process of its own, which imports torch and transformers anew."""
    program = command.program or ""
    module, more = ("remind", (program,)) if program in COMMANDS else (program, ())
    status, output, errors = run_module(module, *more, *words)
    return _checked(command, status, output, errors)


def _as_process(command: Command, words: list[str]) -> str:
    """As a shell would start it, by this Python."""
    front = command.words[: -len(command.arguments) or None]
    line = [sys.executable, "-m", "accelerate.commands.accelerate_cli", *front[1:], *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300)
    return _checked(command, process.returncode, process.stdout, process.stderr)


def _checked(command: Command, status: int, output: str, errors: str) -> str:
    if status:
        pytest.fail(f"{command}\nended with {status}: {errors[-3000:]}", pytrace=False)
    return output
