"""What is distilled besides gold answers and the live model: the model's own answers, teachers of other weights.

Answers are decoded once for questions without a gold one, or are the student's own as it learns: on-policy distillation
(GKD, arXiv 2306.13649) in which the teacher is the model itself under a higher state (SDPO, arXiv 2601.20802).
Teachers may be a running average of the weights, or the model as it was before training: live ones drift, because
student and teacher share their weights; a slow or a fixed teacher does not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import gather_object, send_to_device
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from remind.alignment.config import ExampleConfig
from remind.alignment.examples import Batches, Example, pixels_of
from remind.alignment.objective import FixedTeachers, Head, accumulation_dtype, bucketed
from remind.alignment.step import AlignmentModel, MicroBatch, collate, head_of
from remind.core.errors import ModelError
from remind.core.files import Cache, write_tensors
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
    backbone: Backbone, examples: Sequence[Example], level: int, config: ExampleConfig, accelerator: Any, draw: str = ""
) -> list[list[int]]:
    """Answers to a batch with their end token: greedy, or at `config.temperature` those that `draw` fixes."""
    device, end = accelerator.device, end_token_id(backbone.tokenizer)
    rows, images = [example.prompts[level].tolist() for example in examples], pixels_of(examples) or None
    settings = decoding(backbone, config.max_decoded, config.temperature if draw else 0.0)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), accelerator.autocast():
        torch.manual_seed(int.from_bytes(hashlib.sha256(draw.encode()).digest()[:7], "little"))
        found = continue_rows(backbone.model, rows, settings, images)
    # an answer that was cut off gets an end token, too: where nothing but edges counts, no token is a target
    return [[*ids, end] for ids, _ in found]


def decoded(
    backbone: Backbone, examples: Sequence[Example], config: ExampleConfig, cache: Cache, base: str, accelerator: Any
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
    about.append(end_token_id(backbone.tokenizer))

    def answers(group: list[Example]) -> list[list[int]]:
        key = [*about, hashlib.sha256(b"".join(e.content((level,)) for e in group)).hexdigest()]
        entry = cache.read("decoded", key)
        found: list[list[int]] = answer(backbone, group, level, config, accelerator) if entry is None else entry[1]
        if entry is None:
            cache.write("decoded", key, {}, found)
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

    def at(self, step: int) -> Mapping[str, list[int]]:
        """Tokens by question id for the examples of a step (0-based).

        Steps beyond the end of the run are answered, too: the batches of a run that is made longer stay the same.
        """
        if str(step) not in self.answers:
            config, every = self.config, self.config.refresh_steps
            coming = range(step, (step // every + 1) * every)
            steps = [(number, self.examples[place]) for number in coming for place in self.order.batch(number)]
            examples = [example for _, example in steps]
            found: list[tuple[str, str, list[int]]] = []
            for number, group in enumerate(grouped(examples, 0, config)):
                if number % self.accelerator.num_processes == self.accelerator.process_index:
                    some, draw = [examples[place] for place in group], f"{self.order.seed}:{step}:{number}"
                    ids = answer(self.backbone, some, 0, config, self.accelerator, draw)
                    found += [
                        (str(steps[place][0]), examples[place].id, own) for place, own in zip(group, ids, strict=True)
                    ]
            self.answers = {str(number): {} for number in coming}
            for key, name, own in gather_object(found):
                self.answers[key][name] = own
        return self.answers[str(step)]


# teachers


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def whole(value: Tensor) -> Tensor:
    """The full tensor, detached; gathers the shards of FSDP2 (every process must call it)."""
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


@torch.no_grad()
def topk_targets(hidden: Tensor, head: Head, tau: float, k: int = 64, chunk: int = 128) -> tuple[Tensor, Tensor]:
    """What `FixedTeachers.topk` holds of a level.

    Args:
        hidden: [N, d]. head: its logits are float32 (float64 where hidden states are), `chunk` positions at a time.
        k: tokens kept per position; at most all.

    Returns:
        indices [N, k] int32, by falling probability; log_probs [N, k + 1] float32 (float64).
    """
    head, pieces = head.wide(accumulation_dtype(hidden.dtype)), []
    for piece in hidden.split(chunk):
        scaled = head.logits(piece) / tau
        indices = scaled.topk(min(k, scaled.shape[-1]), dim=-1).indices
        pieces.append((indices.int(), bucketed(scaled, F.log_softmax(scaled, dim=-1), indices)))
    indices, log_probs = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return indices, log_probs


class Ema:
    """A running average, in float32, of the parameters that are trained; it begins with their first values.

    Args:
        model: the language model, as it is trained (sharded, where it is).
        levels: those that teach.
        prefix_sharing: compute what x1 and x2 have in common once.
    """

    def __init__(self, model: nn.Module, decay: float, levels: Sequence[int], prefix_sharing: bool = False) -> None:
        self.model, self.decay, self.levels = model, decay, tuple(levels)
        self.prefix_sharing = prefix_sharing
        self.shadow: dict[str, Tensor] = {
            name: parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
            for name, parameter in trained_parameters(model).items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """After an optimiser step: average ← decay · average + (1 − decay) · weights."""
        for name, parameter in trained_parameters(self.model).items():
            average = _local(self.shadow[name])
            average.lerp_(_local(parameter).to(average.dtype), 1 - self.decay)

    @torch.no_grad()
    def of(self, module: nn.Module, batch: MicroBatch) -> FixedTeachers:
        """The teachers of a microbatch; `module`: the `AlignmentModel` of the model, possibly wrapped.

        The average stands in the place of the weights meanwhile; they come back bit by bit.
        """
        _reshard(module)
        parameters = {name: _local(parameter) for name, parameter in trained_parameters(self.model).items()}
        weights = {name: parameter.clone() for name, parameter in parameters.items()}
        try:
            for name, parameter in parameters.items():
                parameter.copy_(_local(self.shadow[name]))
            # the student's own head will do where it never changes; PEFT makes the weights of some as they are read
            with torch.enable_grad():
                head = _kept(head_of(self.model))
            hidden = module(batch, self.levels, shared=self.prefix_sharing, terms=False)[1]
            # FSDP may still hold whole weights, and would go on with them
            _reshard(module)
        finally:
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
        return FixedTeachers(hidden, head)

    def save(self, path: Path, writes: bool) -> None:
        """Write the averages; every process calls it, since shards are gathered."""
        full = {name: whole(value).cpu().contiguous() for name, value in self.shadow.items()}
        if writes:
            write_tensors(path, full)

    @torch.no_grad()
    def restore(self, path: Path) -> None:
        for name, value in load_file(path).items():
            shadow = self.shadow[name]
            value = value.to(shadow.device)
            if isinstance(shadow, DTensor):
                value = distribute_tensor(value, shadow.device_mesh, shadow.placements)
            shadow.copy_(value)


def _kept(head: Head) -> Head | None:
    """A copy of a head that is trained; None: the student's own will do."""
    if not any(part is not None and part.requires_grad for part in head[:2]):
        return None
    return head._replace(
        weight=whole(head.weight).clone(), bias=None if head.bias is None else whole(head.bias).clone()
    )


def _reshard(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _local(value: Tensor) -> Tensor:
    """The part of a tensor that this process holds; writing to it writes to the tensor."""
    value = value.detach()
    return value.to_local() if isinstance(value, DTensor) else value


class BaseTargets:
    """Targets of the model as it was before training: computed once, kept on disk, read as the steps need them.

    Args:
        module: the model as it is before training, on the device it runs on; its head is kept where it is trained.
        examples: those of the training split.
        base: fingerprint of the weights.

    Raises:
        OSError: the cache cannot be written.
    """

    def __init__(
        self, module: AlignmentModel, examples: Sequence[Example], base: str, cache: Cache, accelerator: Any
    ) -> None:
        self.objective, self.cache = module.objective, cache
        self.levels, head = tuple(sorted(self.objective.taught)), head_of(module.model)
        self.head = _kept(head) if self.objective.base_targets == "hidden" else None
        self.about: list[Any] = [base, str(head.weight.dtype), self.levels, self.objective.base_targets]
        if self.objective.base_targets == "topk":
            self.about += [self.objective.topk, self.objective.tau]
        for number in divided(len(examples), accelerator, "base targets"):
            key = self._key(examples[number])
            if cache.read("targets", key) is None:
                cache.write("targets", key, self._compute(module, examples[number]))

    def of(self, module: nn.Module, batch: MicroBatch) -> FixedTeachers:
        """The teachers of a microbatch. Raises ModelError where they are no longer on disk."""
        entries = [self.cache.read("targets", self._key(example)) for example in batch.examples]
        rows = [entry[0] for entry in entries if entry is not None]
        if len(rows) < len(entries):
            raise ModelError(
                f"{self.cache.folder}: base targets are missing; resume the run, which computes them again"
            )
        found = {name: torch.cat([row[name] for row in rows]).to(batch.targets.device) for name in rows[0]}
        if self.objective.base_targets == "hidden":
            return FixedTeachers({level: found[f"hidden{level}"] for level in self.levels}, self.head)
        return FixedTeachers({level: (found[f"indices{level}"], found[f"log_probs{level}"]) for level in self.levels})

    @torch.no_grad()
    def _compute(self, module: AlignmentModel, example: Example) -> dict[str, Tensor]:
        head = head_of(module.model)
        targets: dict[str, Tensor] = {}
        batch = send_to_device(collate([(example, 1.0)]), head.weight.device)
        for level, hidden in module(batch, self.levels, terms=False)[1].items():
            if self.objective.base_targets == "hidden":
                targets[f"hidden{level}"] = hidden
            else:
                indices, log_probs = topk_targets(hidden, head, self.objective.tau, self.objective.topk)
                targets |= {f"indices{level}": indices, f"log_probs{level}": log_probs}
        return {name: value.cpu() for name, value in targets.items()}

    def _key(self, example: Example) -> list[Any]:
        return [self.about, hashlib.sha256(example.content(self.levels)).hexdigest()]
