"""Answers of the model itself: decoded once for questions without a gold one, or the student's own as it learns.

On-policy targets are on-policy distillation (GKD, arXiv 2306.13649) in which the teacher is the model itself under a
higher state (on-policy self-distillation: SDPO, arXiv 2601.20802).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object

from remind.alignment.config import ExampleConfig
from remind.alignment.examples import Batches, Example, pixels_of
from remind.core.cache import Cache
from remind.core.progress import track
from remind.models.backbone import Backbone
from remind.models.chat import end_token_id
from remind.models.generate import batches, continue_rows, decoding


def divided(pieces: int, accelerator: Any, description: str) -> Iterator[int]:
    """The numbers of the pieces of work that this process does; ends when all processes have done theirs."""
    own = range(accelerator.process_index, pieces, accelerator.num_processes)
    yield from track(own, description, len(own)) if own else ()
    accelerator.wait_for_everyone()


def grouped(examples: Sequence[Example], level: int, config: ExampleConfig) -> list[list[int]]:
    """Places of the examples that are answered together, in batches of similar length."""
    return batches([len(example.prompts[level]) for example in examples], config.decode_batch)


def answer(
    backbone: Backbone,
    examples: Sequence[Example],
    level: int,
    config: ExampleConfig,
    accelerator: Any,
    temperature: float = 0.0,
    draw: str = "",
) -> list[list[int]]:
    """Answers to a batch with their end token; at a temperature above 0 `draw` fixes what is sampled."""
    device, end = accelerator.device, end_token_id(backbone.tokenizer)
    rows, images = [example.prompts[level].tolist() for example in examples], pixels_of(examples) or None
    with torch.random.fork_rng([device] if device.type == "cuda" else []), accelerator.autocast():
        torch.manual_seed(int.from_bytes(hashlib.sha256(draw.encode()).digest()[:7], "little"))
        found = continue_rows(backbone.model, rows, decoding(backbone, config.max_decoded, temperature), images)
    # an answer that was cut off gets an end token, too: where nothing but edges counts, no token is a target
    return [[*ids, end] for ids, _ in found]


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
        OSError: the cache cannot be written.
    """
    level, most = int(config.unlabelled[1:]), backbone.max_length - config.max_decoded
    fit = [e for e in examples if 0 < len(e.prompts[level]) <= most]
    groups = [[fit[place] for place in places] for places in grouped(fit, level, config)]
    about = ["decoded tokens", base, str(backbone.dtype), config.unlabelled, config.max_decoded]

    def answers(group: list[Example]) -> list[list[int]]:
        key = [*about, hashlib.sha256(b"".join(e.content((level,)) for e in group)).hexdigest()]
        found: list[list[int]] = cache.json("decoded", key, lambda: answer(backbone, group, level, config, accelerator))
        return found

    for number in divided(len(groups), accelerator, f"answer from {config.unlabelled}"):
        answers(groups[number])
    return {e.id: ids for group in groups for e, ids in zip(group, answers(group), strict=True)}


class StudentAnswers:
    """The student's answers to the questions of the coming steps, generated again every `refresh_steps` steps.

    Questions are answered in batches that do not depend on the number of processes, which divide them. Answers that no
    step has used yet belong to a checkpoint: the weights that gave them may be gone by then.

    Args:
        examples: those of the training split, in order. order: which of them a step has.

    Attributes:
        answers: tokens by step, written as text, and question id.
    """

    def __init__(
        self, backbone: Backbone, config: ExampleConfig, accelerator: Any, order: Batches, examples: Sequence[Example]
    ) -> None:
        self.backbone, self.config, self.accelerator = backbone, config, accelerator
        self.order, self.examples = order, examples
        self.answers: dict[str, dict[str, list[int]]] = {}

    def at(self, step: int, total: int) -> Mapping[str, list[int]]:
        """Tokens by question id for the examples of a step.

        Args:
            step: 0-based. total: how many steps there are.
        """
        if str(step) not in self.answers:
            config, every = self.config, self.config.refresh_steps
            coming = range(step, min((step // every + 1) * every, total))
            steps = [(number, self.examples[place]) for number in coming for place in self.order.batch(number)]
            examples = [example for _, example in steps]
            found: list[tuple[str, str, list[int]]] = []
            for number, group in enumerate(grouped(examples, 0, config)):
                if number % self.accelerator.num_processes == self.accelerator.process_index:
                    some, draw = [examples[place] for place in group], f"{self.order.seed}:{step}:{number}"
                    ids = answer(self.backbone, some, 0, config, self.accelerator, config.temperature, draw)
                    found += [
                        (str(steps[place][0]), examples[place].id, own) for place, own in zip(group, ids, strict=True)
                    ]
            self.answers = {str(number): {} for number in coming}
            for key, name, own in gather_object(found):
                self.answers[key][name] = own
        return self.answers[str(step)]
