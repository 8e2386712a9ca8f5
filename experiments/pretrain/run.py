"""Trains the shipped nano checkpoint, and writes beside it how it was made and how it scores."""

from __future__ import annotations

import hashlib
import math
import platform
import random
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

from remind.core.errors import ConfigError
from remind.core.files import atomic_folder, read_json, sha256_file, write_json, write_rows
from remind.core.progress import ProgressBar, without_loading_bars
from remind.data.dialogue import FORMATS
from remind.models.nano import nano_folder, nano_image_processor, nano_model, nano_tokenizer
from remind.states.pyramid import LEVELS
from remind.testbed.ladder import LadderConfig, records
from remind.testbed.world import WorldConfig, lexicon, make_world
from sae.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, Range, Seed, Share, ShareBelowOne, check_ranges

if TYPE_CHECKING:
    from experiments.pretrain.lessons import Kind, Lesson, Lessons

#: Batches drawn at once and sorted by length among them, so that little is padded.
_DRAWN = 16
#: Steps between rows of metrics.jsonl.
_LOG_EVERY = 250
#: Worlds the checkpoint is measured on: with the rule it has never seen, and one in which x0 alone gives the answer.
MEASURED = {
    "flag": WorldConfig(train=0, dev=0, test=60, seed=20_000),
    "plain": WorldConfig(train=0, dev=0, test=30, rule="none", contrary=(0, 0), second_voice=0.0, seed=20_001),
}


@dataclass
class PretrainConfig:
    """Train the nano backbone on worlds in which the flag word means nothing.

    The shipped checkpoint is made by two runs: one with the defaults, on short prompts, and one that goes on from it on
    prompts as the pipeline renders them (start, with --steps 800 --lessons 2500 --lr 1e-3).
    """

    out: str = "runs/nano"
    """Hugging Face folder to write, with provenance.json and metrics.jsonl."""
    start: str | None = None
    """Checkpoint to go on from, with questions as the pipeline renders them; None: from random weights, with short
    ones."""
    steps: PositiveInt = 6500
    """Optimiser steps."""
    batch: PositiveInt = 32
    """Questions of a step."""
    lessons: PositiveInt = 24000
    """Questions of each format to draw from."""
    lr: PositiveFloat = 2e-3
    """Highest learning rate of AdamW; warm-up, then a cosine down to a hundredth."""
    weight_decay: NonNegativeFloat = 0.05
    """Of matrices; embeddings and norms have none."""
    single: ShareBelowOne = 0.15
    """Share of the steps after which single choice joins short answers."""
    multi: ShareBelowOne = 0.4
    """Share of the steps after which multiple choice joins."""
    easy: tuple[Share, Share] = (0.12, 0.35)
    """Shares of a format's time until which its questions are short, then middling."""
    remarks: NonNegativeFloat = 0.1
    """Weight of the auxiliary loss on remarks."""
    focus: NonNegativeFloat = 0.2
    """Weight of the auxiliary loss on the attention to evidence."""
    options: NonNegativeFloat = 0.5
    """Weight of the auxiliary loss on options: right or not."""
    letters: NonNegativeFloat = 0.2
    """Weight of the auxiliary loss on the letters of options."""
    std: PositiveFloat = 0.065
    """Standard deviation of the first weights."""
    embedding_std: PositiveFloat = 0.05
    """The same of the embedding."""
    norm: PositiveFloat = 1.7
    """First gain of query and key norms."""
    hidden_size: PositiveInt = 128
    """Width."""
    layers: PositiveInt = 4
    """Decoder blocks."""
    threads: Annotated[int, Range(ge=1, le=1024)] = 2
    """CPU threads; another number gives other last bits."""
    seed: Seed = 0
    """Weights, lessons and their order."""
    overwrite: bool = False
    """Replace an existing folder."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        self.easy = (self.easy[0], self.easy[1])
        if self.single > self.multi:
            raise ConfigError(f"single is {self.single}; it must be at most multi, {self.multi}")


def pretrain(cfg: PretrainConfig) -> Path:
    """Train, measure, save; prints where the result is.

    Returns:
        The folder: a Qwen3-VL checkpoint with its tokenizer, provenance.json, metrics.jsonl.

    Raises:
        ConfigError: out exists and overwrite is off.
    """
    import torch

    from experiments.pretrain.lessons import KINDS, later_mixture, make_lessons

    if Path(cfg.out).exists() and not cfg.overwrite:
        raise ConfigError(f"{cfg.out} exists; choose another out or set overwrite")
    torch.set_num_threads(cfg.threads)
    tokenizer = nano_tokenizer()
    kinds: list[Kind] = [kind for kind in KINDS if kind != "built"]
    if cfg.start is not None:
        kinds = list(dict.fromkeys(kind for _, used in later_mixture().values() for kind in used))
    lessons = make_lessons(tokenizer, cfg.lessons, cfg.seed, kinds)
    began = perf_counter()
    with atomic_folder(cfg.out) as folder, without_loading_bars():
        model, tokens = _train(cfg, tokenizer, lessons, folder / "metrics.jsonl")
        seconds = perf_counter() - began
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        # as it ships, not in another layout
        shutil.copyfile(nano_folder() / "tokenizer.json", folder / "tokenizer.json")
        nano_image_processor().save_pretrained(folder)
        about = {
            "license": "Apache-2.0",
            "what": "Qwen3-VL in miniature, pre-trained on synthetic dialogues; its vision tower has random weights",
            "made_by": "python -m experiments.pretrain",
            "config": asdict(cfg) | {"out": None, "overwrite": None, "start": None},
            "start": None if cfg.start is None else read_json(Path(cfg.start) / "provenance.json"),
            "lessons_sha256": _hash(lessons),
            "tokens": tokens,
            "seconds": round(seconds),
            "machine": f"{platform.machine()}, {cfg.threads} threads",
            "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
            "sha256": {name: sha256_file(folder / name) for name in ("model.safetensors", "tokenizer.json")},
            "accuracy": measure(folder),
        }
        write_json(folder / "provenance.json", about)
    print(f"checkpoint: {cfg.out}; its accuracy is in {Path(cfg.out) / 'provenance.json'}")
    return Path(cfg.out)


def _train(cfg: PretrainConfig, tokenizer: Any, lessons: Lessons, log: Path) -> tuple[Any, int]:
    """The model after the last step, and how many tokens it was trained on."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    from experiments.pretrain.heads import AuxiliaryHeads
    from remind.models.backbone import load_backbone

    if cfg.start is None:
        model = nano_model(cfg.seed, hidden_size=cfg.hidden_size, layers=cfg.layers)
        decoder = model.model.language_model
        init_weights(cfg, tokenizer, decoder)
    else:
        model = load_backbone(cfg.start).model
        decoder = model.model.language_model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cfg.seed)
        heads = AuxiliaryHeads(
            tokenizer, decoder, decoder.config.hidden_size, options=decoder.config.num_hidden_layers - 1
        )
    matrices = [p for name, p in decoder.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in decoder.named_parameters() if p.ndim != 2 or "embed" in name]
    groups = [
        {"params": matrices, "weight_decay": cfg.weight_decay},
        {"params": [*others, *heads.parameters()], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=(0.9, 0.98))
    weights = {"remarks": cfg.remarks, "focus": cfg.focus, "options": cfg.options, "letters": cfg.letters}
    tokens = 0
    rows: list[dict[str, Any]] = []
    decoder.train()
    with ProgressBar("pre-train", cfg.steps) as bar:
        for step, batch in enumerate(_batches(cfg, lessons), start=1):
            for group in optimizer.param_groups:
                group["lr"] = _rate(cfg, step - 1)
            logits, targets, size = _answer_logits(decoder, batch, tokenizer.pad_token_id)
            tokens += size
            answer = F.cross_entropy(logits, targets)
            parts = dict(zip(weights, heads(batch), strict=True))
            loss = answer + sum((weights[name] * part for name, part in parts.items()), answer.new_zeros(()))
            loss.backward()
            nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % _LOG_EVERY == 0 or step == cfg.steps:
                losses = {name: round(float(part.detach()), 5) for name, part in {"answer": answer, **parts}.items()}
                rows.append({"step": step, "tokens": tokens, **losses})
            bar.step(note=f"loss {float(answer.detach()):.3f}")
    write_rows(log, rows)
    return model.eval(), tokens


def _answer_logits(decoder: Any, lessons: Sequence[Lesson], pad: int) -> tuple[Any, Any, int]:
    """Logits [N, V] at the positions that predict the answers, the answers [N], and how many tokens were computed."""
    import torch
    from torch.nn import functional as F

    width = max(len(x.prompt) + len(x.answer) - 1 for x in lessons)
    ids = torch.full((len(lessons), width), pad)
    places = []
    for row, lesson in enumerate(lessons):
        ids[row, : len(lesson.prompt)] = lesson.prompt
        ids[row, len(lesson.prompt) : len(lesson.prompt) + len(lesson.answer) - 1] = lesson.answer[:-1]
        start = row * width + len(lesson.prompt) - 1
        places.append(torch.arange(start, start + len(lesson.answer)))
    positions = torch.arange(width).expand(3, *ids.shape)
    hidden = decoder(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    logits = F.linear(hidden.flatten(0, 1)[torch.cat(places)], decoder.embed_tokens.weight)
    return logits, torch.cat([x.answer for x in lessons]).long(), ids.numel()


def init_weights(cfg: PretrainConfig, tokenizer: Any, decoder: Any) -> None:
    """Initial weights. Embeddings of words of one value are near one another, as in vectors learned from text."""
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
            for text in (letter, f"{letter}. "):
                put(text, value)


def _batches(cfg: PretrainConfig, lessons: Lessons) -> Iterator[list[Lesson]]:
    from experiments.pretrain.lessons import later_mixture, mixture

    rng = random.Random(f"remind-pretrain:{cfg.seed}")
    done = 0
    while done < cfg.steps:
        parts = later_mixture() if cfg.start else mixture(done / cfg.steps, cfg.single, cfg.multi, cfg.easy)
        drawn = []
        for _ in range(cfg.batch * min(_DRAWN, cfg.steps - done)):
            name = rng.choices(list(parts), [weight for weight, _ in parts.values()])[0]
            kinds = [kind for kind in parts[name][1] if (kind, name) in lessons]
            drawn.append(rng.choice(lessons[rng.choice(kinds), name]))
        drawn.sort(key=lambda lesson: len(lesson.prompt))
        batches = [drawn[start : start + cfg.batch] for start in range(0, len(drawn), cfg.batch)]
        rng.shuffle(batches)
        yield from batches
        done += len(batches)


def _rate(cfg: PretrainConfig, step: int) -> float:
    warm_up = min(1.0, (step + 1) / 60)
    return cfg.lr * warm_up * (0.505 + 0.495 * math.cos(math.pi * step / cfg.steps))


def _hash(lessons: Lessons) -> str:
    digest = hashlib.sha256()
    for key in sorted(lessons):
        for lesson in lessons[key]:
            digest.update(lesson.prompt.numpy().tobytes() + lesson.answer.numpy().tobytes())
    return digest.hexdigest()


def measure(folder: str | Path, worlds: Iterable[str] | None = None) -> dict[str, Any]:
    """Accuracy of a checkpoint by world of `MEASURED` (None: all), format and level, with 95 % Wilson intervals."""
    from remind.evaluation.statistics import wilson
    from remind.models.backbone import load_backbone
    from remind.testbed.accuracy import correct_answers

    backbone = load_backbone(folder)
    scores: dict[str, Any] = {}
    for world in worlds or MEASURED:
        questions = records(make_world(MEASURED[world]), LadderConfig())
        scores[world] = {name: {} for name in FORMATS}
        for level in LEVELS:
            correct = correct_answers(backbone, questions, level)
            for name in FORMATS:
                own = [hit for hit, record in zip(correct, questions, strict=True) if record.format == name]
                estimate: Any = wilson(own)
                scores[world][name][level] = {key: round(value, 4) for key, value in estimate.items()}
    return scores
