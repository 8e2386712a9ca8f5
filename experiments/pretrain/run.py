"""Trains the shipped nano checkpoint, and writes beside it what it is made of and how it scores."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

from experiments.pretrain.course import Course, Lesson, lessons_of, step_at, write_course
from remind.core.errors import ConfigError
from remind.core.files import atomic_folder, sha256_file, write_json, write_text
from remind.core.progress import Counter, without_loading_bars
from remind.data.dialogue import FORMATS
from remind.models.nano import nano_folder, nano_image_processor, nano_model, nano_tokenizer
from remind.testbed.ladder import LadderConfig, records
from remind.testbed.world import WorldConfig, lexicon, make_world

#: Sorted by length within so many batches, so that little is padded.
_SHELF = 16


@dataclass
class PretrainConfig:
    """Train the nano backbone on worlds in which the flag word means nothing."""

    out: str = "runs/nano"
    """Hugging Face folder to write, with provenance.json and metrics.jsonl."""
    steps: int = 6500
    """Optimiser steps."""
    batch: int = 32
    """Questions of a step."""
    lessons: int = 24000
    """Questions of each format to draw from."""
    lr: float = 2e-3
    """Highest learning rate of AdamW; warm-up, then a cosine down to a hundredth."""
    weight_decay: float = 0.05
    """Of matrices; embeddings and norms have none."""
    single: float = 0.15
    """Share of the steps after which single choice joins short answers."""
    multi: float = 0.4
    """Share of the steps after which multiple choice joins."""
    easy: tuple[float, float] = (0.12, 0.35)
    """Shares of a format's time until which its questions are short, then middling."""
    remarks: float = 0.1
    """Weight of the auxiliary loss on remarks."""
    focus: float = 0.2
    """Weight of the auxiliary loss on the attention to evidence."""
    options: float = 0.5
    """Weight of the auxiliary loss on options: right or not."""
    letters: float = 0.2
    """Weight of the auxiliary loss on the letters of options."""
    std: float = 0.065
    """Standard deviation of the first weights."""
    embedding_std: float = 0.05
    """The same of the embedding."""
    norm: float = 1.7
    """First gain of query and key norms."""
    hidden_size: int = 128
    """Width."""
    layers: int = 4
    """Decoder blocks."""
    threads: int = 2
    """CPU threads; another number gives other last bits."""
    seed: int = 0
    """Weights, lessons and their order."""
    overwrite: bool = False
    """Replace an existing folder."""

    def __post_init__(self) -> None:
        self.easy = (self.easy[0], self.easy[1])
        for name in ("steps", "batch", "lessons", "layers", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if not 0 <= self.single <= self.multi < 1:
            raise ConfigError("single and multi are shares of the steps, the first not above the second, both below 1")


def pretrain(cfg: PretrainConfig) -> Path:
    """Train, measure, save; prints where the result is.

    Returns:
        The folder: a Qwen3-VL checkpoint with its tokenizer, provenance.json, metrics.jsonl.

    Raises:
        ConfigError: out exists and overwrite is off.
    """
    import torch

    if Path(cfg.out).exists() and not cfg.overwrite:
        raise ConfigError(f"{cfg.out} exists; choose another out or set overwrite")
    torch.set_num_threads(cfg.threads)
    tokenizer = nano_tokenizer()
    course = write_course(cfg.lessons, cfg.seed, cfg.threads)
    began = perf_counter()
    with atomic_folder(cfg.out) as folder, without_loading_bars():
        model, tokens = _train(cfg, tokenizer, course, folder / "metrics.jsonl")
        seconds = perf_counter() - began
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        # as it ships, not in another layout
        shutil.copyfile(nano_folder() / "tokenizer.json", folder / "tokenizer.json")
        nano_image_processor().save_pretrained(folder)
        scores = measure(folder)
        about = {
            "license": "Apache-2.0",
            "what": "Qwen3-VL in miniature, pre-trained on synthetic dialogues; its vision tower has random weights",
            "made_by": "python -m experiments.pretrain",
            "config": asdict(cfg) | {"out": None, "overwrite": None},
            "lessons_sha256": _hash(course),
            "tokens": tokens,
            "seconds": round(seconds),
            "machine": f"{platform.machine()}, {cfg.threads} threads",
            "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
            "sha256": {name: sha256_file(folder / name) for name in ("model.safetensors", "tokenizer.json")},
            "accuracy": scores,
        }
        write_json(folder / "provenance.json", about)
    print(table(scores))
    print(f"checkpoint: {cfg.out}")
    return Path(cfg.out)


# training


def _train(cfg: PretrainConfig, tokenizer: Any, course: Course, log: Path) -> tuple[Any, int]:
    """The model after the last step, and the tokens it read."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    from experiments.pretrain.hints import Hints

    model = nano_model(cfg.seed, hidden_size=cfg.hidden_size, layers=cfg.layers)
    decoder = model.model.language_model
    begin_weights(cfg, tokenizer, decoder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cfg.seed)
        hints = Hints(tokenizer, decoder, cfg.hidden_size, options=cfg.layers - 1)
    head = decoder.embed_tokens.weight
    matrices = [p for name, p in decoder.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in decoder.named_parameters() if p.ndim != 2 or "embed" in name]
    groups = [
        {"params": matrices, "weight_decay": cfg.weight_decay},
        {"params": [*others, *hints.parameters()], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=(0.9, 0.98))
    pad, tokens = tokenizer.pad_token_id, 0
    decoder.train()
    metrics: list[str] = []
    held_out = [
        lesson
        for kind in ("apart", "full")
        for name in FORMATS
        for lesson in lessons_of(tokenizer, kind, name, 200, cfg.seed + 1)  # type: ignore[arg-type]
    ]
    verbose = bool(os.environ.get("REMIND_VERBOSE"))
    with Counter("pre-train", cfg.steps) as bar:
        for number, lessons in enumerate(_batches(cfg, course)):
            ids, places, targets = _tensors(lessons, pad)
            tokens += ids.numel()
            for group in optimizer.param_groups:
                group["lr"] = _rate(cfg, number)
            positions = torch.arange(ids.shape[1]).expand(3, *ids.shape)
            hidden = decoder(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
            answer = F.cross_entropy(F.linear(hidden.flatten(0, 1)[places], head), targets)
            parts = hints(lessons)
            weights = (cfg.remarks, cfg.focus, cfg.options, cfg.letters)
            loss = answer + sum((w * part for w, part in zip(weights, parts, strict=True)), hidden.new_zeros(()))
            loss.backward()
            nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if (number + 1) % 250 == 0 or number + 1 == cfg.steps:
                names = ("answer", "remarks", "focus", "options", "letters")
                values = dict(zip(names, (float(part.detach()) for part in (answer, *parts)), strict=True))
                row = {"step": number + 1, "tokens": tokens, **{k: round(v, 5) for k, v in values.items()}}
                row["accuracy"] = _quick(decoder, held_out, pad)
                metrics.append(json.dumps(row) + "\n")
                if verbose:
                    print(metrics[-1], end="", flush=True)
            bar.step(note=f"loss {float(answer.detach()):.3f}")
    write_text(log, "".join(metrics))
    return model.eval(), tokens


def _quick(decoder: Any, lessons: Sequence[Lesson], pad: int) -> dict[str, list[float]]:
    """Share of lessons whose answer is the likeliest token by token, by format under x0, x1 and x2."""
    import torch
    from torch.nn import functional as F

    right: dict[str, list[list[bool]]] = {name: [[], [], []] for name in FORMATS}
    decoder.eval()
    ordered = sorted(lessons, key=lambda lesson: len(lesson.prompt))
    with torch.no_grad():
        for start in range(0, len(ordered), 64):
            batch = ordered[start : start + 64]
            ids, places, targets = _tensors(batch, pad)
            positions = torch.arange(ids.shape[1]).expand(3, *ids.shape)
            hidden = decoder(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
            hits = F.linear(hidden.flatten(0, 1)[places], decoder.embed_tokens.weight).argmax(-1) == targets
            for lesson, ok in zip(batch, hits.split([len(x.answer) for x in batch]), strict=True):
                right[lesson.format][lesson.level].append(bool(ok.all()))
    decoder.train()
    return {name: [round(sum(x) / max(1, len(x)), 3) for x in levels] for name, levels in right.items()}


def begin_weights(cfg: PretrainConfig, tokenizer: Any, decoder: Any) -> None:
    """First weights. Words of one value begin alike, as they would in vectors learned from text."""
    import torch

    from remind.models.chat import tokenize

    generator = torch.Generator().manual_seed(cfg.seed + 7)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                parameter.fill_(cfg.norm)
            elif parameter.ndim == 2:
                std = cfg.embedding_std if "embed" in name else cfg.std
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        table = decoder.embed_tokens.weight

        def vector() -> Any:
            return torch.randn(cfg.hidden_size, generator=generator)

        def put(text: str, *shared: Any) -> None:
            [index] = tokenize(tokenizer, text).ids
            table[index] = cfg.embedding_std * sum(shared, vector()) / math.sqrt(len(shared) + 1)

        roles = {name: vector() for name in ("label", "gist", "cues", "fits")}
        for words in lexicon()["dimensions"].values():
            whole = vector()
            for entry in words["values"].values():
                value = 1.2 * vector() + 0.5 * whole
                for role, vectors in roles.items():
                    for text in entry.get(role, ()):
                        put(text, value, vectors)
            for stance in ("keen", "averse"):
                value = vector()
                for text in words.get(stance, ()):
                    put(text, value, roles["cues"])
        for letter in "ABCD":
            value = vector()
            put(letter, value)
            put(f"{letter}. ", value)


def _batches(cfg: PretrainConfig, course: Course) -> Iterator[list[Lesson]]:
    rng = random.Random(f"remind-pretrain:{cfg.seed}")
    done = 0
    while done < cfg.steps:
        mixture = step_at(done / cfg.steps, cfg.single, cfg.multi, cfg.easy)
        drawn = []
        for _ in range(cfg.batch * min(_SHELF, cfg.steps - done)):
            name = rng.choices(list(mixture.formats), list(mixture.formats.values()))[0]
            kinds = [kind for kind in mixture.kinds[name] if (kind, name) in course]
            drawn.append(rng.choice(course[rng.choice(kinds), name]))
        drawn.sort(key=lambda lesson: len(lesson.prompt))
        batches = [drawn[start : start + cfg.batch] for start in range(0, len(drawn), cfg.batch)]
        rng.shuffle(batches)
        yield from batches
        done += len(batches)


def _tensors(lessons: Sequence[Lesson], pad: int) -> tuple[Any, Any, Any]:
    """input_ids [B, T] padded on the right; flat positions that predict the answers, and the answers [N]."""
    import torch

    width = max(len(x.prompt) + len(x.answer) - 1 for x in lessons)
    ids = torch.full((len(lessons), width), pad)
    places = []
    for row, lesson in enumerate(lessons):
        ids[row, : len(lesson.prompt)] = lesson.prompt
        ids[row, len(lesson.prompt) : len(lesson.prompt) + len(lesson.answer) - 1] = lesson.answer[:-1]
        start = row * width + len(lesson.prompt) - 1
        places.append(torch.arange(start, start + len(lesson.answer)))
    return ids, torch.cat(places), torch.cat([x.answer for x in lessons]).long()


def _rate(cfg: PretrainConfig, step: int) -> float:
    warm = min(1.0, (step + 1) / 60)
    return cfg.lr * warm * (0.505 + 0.495 * math.cos(math.pi * step / cfg.steps))


def _hash(course: Course) -> str:
    digest = hashlib.sha256()
    for key in sorted(course):
        for lesson in course[key]:
            digest.update(lesson.prompt.numpy().tobytes() + lesson.answer.numpy().tobytes())
    return digest.hexdigest()


# measuring

#: Worlds the checkpoint is measured on: with the rule it has never seen, and one in which x0 alone tells the answer.
MEASURED = {
    "flag": WorldConfig(train=0, dev=0, test=60, seed=20_000),
    "plain": WorldConfig(train=0, dev=0, test=30, rule="none", contrary=(0, 0), second_voice=0.0, seed=20_001),
}


def measure(folder: str | Path) -> dict[str, Any]:
    """Accuracy of a checkpoint by world, format and level, with 95 % Wilson intervals."""
    from remind.evaluation.intervals import wilson
    from remind.models.load import load_backbone
    from remind.testbed.score import answered

    backbone = load_backbone(folder)
    found: dict[str, Any] = {}
    for name, config in MEASURED.items():
        asked = records(make_world(replace(config)), LadderConfig())
        for level in ("x0", "x1", "x2"):
            right = answered(backbone, asked, level)
            for kind in ("direct", "single", "multi"):
                some = [ok for ok, record in zip(right, asked, strict=True) if record.format == kind]
                estimate = wilson(some)
                assert estimate is not None
                value, low, high = (round(estimate[key], 4) for key in ("value", "low", "high"))
                score = {"value": value, "low": low, "high": high, "n": estimate["n"]}
                found.setdefault(name, {}).setdefault(kind, {})[level] = score
    return found


def table(scores: dict[str, Any]) -> str:
    """The scores as lines of text."""
    lines = [f"{'world':8}{'format':8}" + "".join(f"{level:>22}" for level in ("x0", "x1", "x2"))]
    for world, formats in scores.items():
        for kind, levels in formats.items():
            cells = [f"{x['value']:.3f} [{x['low']:.3f}, {x['high']:.3f}]" for x in levels.values()]
            lines.append(f"{world:8}{kind:8}" + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join(lines)
