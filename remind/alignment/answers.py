"""Answers of the model itself: decoded once for questions without a gold one, or the student's own as it learns.

On-policy targets are on-policy distillation (GKD, arXiv 2306.13649) in which the teacher is the model itself under a
higher state (on-policy self-distillation: SDPO, arXiv 2601.20802).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from remind.alignment.config import ExampleConfig
from remind.alignment.examples import Batches, Example, pixels_of
from remind.core.cache import Cache
from remind.core.progress import track
from remind.models.backbone import Backbone
from remind.models.chat import end_token_id
from remind.models.generate import batches, check_generates, continue_rows, decoding

#: Decoded questions per file: what is computed again after a kill.
_BLOCK = 32
#: Tensors by name and a JSON value.
Entry = tuple[dict[str, Tensor], Any]


def shared_entries(
    cache: Cache, kind: str, keys: Sequence[Any], compute: Callable[[int], Entry], accelerator: Any, description: str
) -> list[Entry]:
    """The entries of all keys, in order; what is missing is computed once, each process computing its share.

    Args:
        kind: subfolder. keys: JSON values. compute: gives the entry of a key by its place in `keys`.

    Raises:
        OSError: an entry cannot be written; then it is absent.
    """
    places = range(accelerator.process_index, len(keys), accelerator.num_processes)
    own = [number for number in places if not cache.has(kind, keys[number])]
    for number in track(own, description, len(own)) if own else ():
        cache.write(kind, keys[number], *compute(number))
    accelerator.wait_for_everyone()
    entries = (cache.read(kind, key) for key in keys)
    return [compute(number) if entry is None else entry for number, entry in enumerate(entries)]


class Writer:
    """Has a model answer questions from one level, in batches of similar length.

    Args:
        temperature: 0: greedily.

    Raises:
        ModelError: a model that does not generate.
    """

    def __init__(self, backbone: Backbone, config: ExampleConfig, accelerator: Any, temperature: float = 0.0) -> None:
        check_generates(backbone)
        self.config, self.accelerator = config, accelerator
        self.settings = decoding(backbone, config.max_decoded, temperature)
        self.end = end_token_id(backbone.tokenizer)

    def batches(self, examples: Sequence[Example], level: int) -> list[list[int]]:
        """Places of the examples that are answered together."""
        return batches([len(example.prompts[level]) for example in examples], self.config.decode_batch)

    def answer(self, model: Any, examples: Sequence[Example], level: int, draw: str) -> list[list[int]]:
        """Answers to a batch with their end token; `draw` fixes what is sampled."""
        device, rows = self.accelerator.device, [example.prompts[level].tolist() for example in examples]
        images = pixels_of(examples) or None
        with torch.random.fork_rng([device] if device.type == "cuda" else []), self.accelerator.autocast():
            torch.manual_seed(int.from_bytes(hashlib.sha256(draw.encode()).digest()[:7], "little"))
            # an answer that was cut off gets an end token, too: where nothing but edges counts, no token is a target
            return [[*ids, self.end] for ids, _ in continue_rows(model, rows, self.settings, images)]


def decoded(
    backbone: Backbone,
    examples: Sequence[Example],
    config: ExampleConfig,
    cache: Cache,
    base: str,
    accelerator: Any,
) -> Mapping[str, list[int]]:
    """Greedy answers under `config.unlabelled`, each decoded once and kept on disk; the processes divide the work.

    Args:
        base: fingerprint of the model's weights.

    Returns:
        Tokens with the end token by question id; questions that leave no room for an answer are not there.

    Raises:
        ModelError: a model that does not generate. OSError: the cache cannot be written.
    """
    level, writer = int(config.unlabelled[1:]), Writer(backbone, config, accelerator)
    fit = [e for e in examples if 0 < len(e.prompts[level]) <= backbone.max_length - config.max_decoded]
    blocks = [fit[start : start + _BLOCK] for start in range(0, len(fit), _BLOCK)]
    about = ["decoded tokens", base, str(backbone.dtype), config.unlabelled, config.max_decoded, config.decode_batch]
    keys = [[*about, hashlib.sha256(b"".join(e.content((level,)) for e in block)).hexdigest()] for block in blocks]

    def compute(number: int) -> Entry:
        block = blocks[number]
        answers: dict[int, list[int]] = {}
        for places in writer.batches(block, level):
            found = writer.answer(backbone.model, [block[place] for place in places], level, "")
            answers |= dict(zip(places, found, strict=True))
        ordered = [answers[place] for place in range(len(block))]
        tokens = torch.tensor([token for answer in ordered for token in answer], dtype=torch.int32)
        return {"tokens": tokens, "lengths": torch.tensor([len(answer) for answer in ordered])}, None

    entries = shared_entries(cache, "decoded", keys, compute, accelerator, f"answer from {config.unlabelled}")
    return {
        example.id: answer.tolist()
        for block, (tensors, _) in zip(blocks, entries, strict=True)
        for example, answer in zip(block, tensors["tokens"].split(tensors["lengths"].tolist()), strict=True)
    }


class StudentAnswers:
    """The student's answers to the questions of the coming steps, generated again every `refresh_steps` steps.

    Questions are answered in batches that do not depend on the number of processes, which divide them. Answers that no
    step has used yet belong to a checkpoint: the weights that gave them may be gone by then.

    Args:
        examples: those of the training split, in order. order: which of them a step has.
    """

    def __init__(self, writer: Writer, order: Batches, examples: Sequence[Example]) -> None:
        self.writer, self.order, self.examples = writer, order, examples
        self._answers: dict[int, dict[str, list[int]]] = {}

    def at(self, step: int, total: int, model: Any) -> Mapping[str, list[int]]:
        """Tokens by question id for the examples of a step.

        Args:
            step: 0-based. total: how many steps there are. model: the language model at its present weights.
        """
        if step not in self._answers:
            self._answer(step, total, model)
        return self._answers[step]

    def _answer(self, step: int, total: int, model: Any) -> None:
        writer, every = self.writer, self.writer.config.refresh_steps
        accelerator = writer.accelerator
        coming = range(step, min((step // every + 1) * every, total))
        questions = [(number, self.examples[place]) for number in coming for place in self.order.batch(number)]
        examples = [example for _, example in questions]
        # token ids + 1, so that 0 is what other processes fill in
        size = (len(questions), writer.config.max_decoded + 1)
        table = torch.zeros(size, dtype=torch.int64, device=accelerator.device)
        for number, group in enumerate(writer.batches(examples, 0)):
            if number % accelerator.num_processes == accelerator.process_index:
                draw = f"{self.order.seed}:{step}:{number}"
                answers = writer.answer(model, [examples[place] for place in group], 0, draw)
                for place, ids in zip(group, answers, strict=True):
                    table[place, : len(ids)] = torch.tensor(ids, device=table.device) + 1
        self._answers = {number: {} for number in coming}
        for (number, example), row in zip(questions, accelerator.reduce(table, "sum").cpu(), strict=True):
            self._answers[number][example.id] = (row[row > 0] - 1).tolist()

    def state(self, step: int) -> dict[str, dict[str, list[int]]]:
        """What a checkpoint after `step` steps keeps."""
        return {str(number): answers for number, answers in self._answers.items() if number >= step}

    def restore(self, state: Mapping[str, dict[str, list[int]]]) -> None:
        self._answers = {int(number): answers for number, answers in state.items()}
