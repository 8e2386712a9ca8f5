"""On-policy targets: the student answers from x0, and x1 and x2 teach at the positions of its answer.

This is on-policy distillation (GKD, arXiv 2306.13649) in which the teacher is the model itself under a higher state
(on-policy self-distillation: SDPO, arXiv 2601.20802).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from remind.alignment.config import TrainConfig
from remind.alignment.data import Order
from remind.alignment.guard import in_memory
from remind.alignment.tokens import Example, pixels_of
from remind.models.backbone import Backbone
from remind.models.chat import end_token_id
from remind.models.generate import batches, check_generates, continue_rows, decoding


class StudentAnswers:
    """The student's answers to the questions of the coming steps, generated again every `data.refresh_steps` steps.

    Questions are answered in batches that do not depend on the number of processes, which divide them. Answers that no
    step has used yet belong to a checkpoint: the weights that gave them may be gone by then.

    Args:
        order, total: which questions a step has, and how many steps there are.
        examples: those of the training split, in order.

    Raises:
        ModelError: a model that does not generate.
    """

    def __init__(
        self,
        backbone: Backbone,
        cfg: TrainConfig,
        order: Order,
        total: int,
        examples: Sequence[Example],
        accelerator: Any,
    ) -> None:
        check_generates(backbone)
        self.config, self.seed = cfg.data, cfg.seed
        self.order, self.total, self.examples, self.accelerator = order, total, examples, accelerator
        self.settings = decoding(backbone, cfg.data.max_decoded, cfg.data.temperature)
        self.end = end_token_id(backbone.tokenizer)
        self._answers: dict[int, list[list[int]]] = {}

    def at(self, step: int, model: Any, note: Callable[[str], None] = lambda _: None) -> list[Example]:
        """The examples of a step with the student's answers; gold answers are kept apart.

        Args:
            step: 0-based. model: the language model at its present weights. note: told how far it is.

        Raises:
            OutOfMemory: on the process where it happened.
        """
        if step not in self._answers:
            self._answer(step, model, note)
        pairs = zip(self.order.batch(step), self._answers[step], strict=True)
        return [self.examples[index].answering(torch.tensor(ids, dtype=torch.int32)) for index, ids in pairs]

    def _answer(self, step: int, model: Any, note: Callable[[str], None]) -> None:
        every, accelerator = self.config.refresh_steps, self.accelerator
        coming = range(step, min((step // every + 1) * every, self.total))
        questions = [(number, self.examples[index]) for number in coming for index in self.order.batch(number)]
        # token ids + 1, so that 0 is what other processes fill in
        table = torch.zeros(len(questions), self.config.max_decoded + 1, dtype=torch.int64, device=accelerator.device)
        groups = batches([len(example.prompts[0]) for _, example in questions], self.config.decode_batch)
        for number, group in enumerate(groups):
            if number % accelerator.num_processes != accelerator.process_index:
                continue
            note(f"the student answers, {number} of {len(groups)} batches")
            asked = [questions[place][1] for place in group]
            work = partial(self._continue, model, asked, f"{self.seed}:{step}:{number}")
            for place, ids in zip(group, in_memory(asked, work), strict=True):
                table[place, : len(ids)] = torch.tensor(ids, device=table.device) + 1
        self._answers = {number: [] for number in coming}
        for (number, _), row in zip(questions, accelerator.reduce(table, "sum").cpu(), strict=True):
            self._answers[number].append((row[row > 0] - 1).tolist())

    def _continue(self, model: Any, examples: Sequence[Example], draw: str) -> list[list[int]]:
        """Answers to a batch with their end token; `draw` fixes what is sampled."""
        device, rows = self.accelerator.device, [example.prompts[0].tolist() for example in examples]
        images = pixels_of(examples) or None
        with torch.random.fork_rng([device] if device.type == "cuda" else []), self.accelerator.autocast():
            torch.manual_seed(int.from_bytes(hashlib.sha256(draw.encode()).digest()[:7], "little"))
            # an answer that was cut off gets an end token, too: where nothing but edges counts, no token is a target
            return [[*ids, self.end] for ids, _ in continue_rows(model, rows, self.settings, images)]

    def state(self, step: int) -> dict[str, list[list[int]]]:
        """What a checkpoint after `step` steps keeps: token ids by step, in the order of its batch."""
        return {str(number): answers for number, answers in self._answers.items() if number >= step}

    def restore(self, state: Mapping[str, list[list[int]]]) -> None:
        self._answers = {int(number): answers for number, answers in state.items()}
