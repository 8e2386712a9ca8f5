"""Samples that go through the model together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from remind.alignment.example import Example
from remind.alignment.objective import N_LEVELS


@dataclass(frozen=True)
class MicroBatch:
    """B samples, N answer positions in all.

    Attributes:
        input_ids: for each level [B, T_level]: prompt and answer without its last token, padded on the right. Padding
            comes after everything that is read, so a causal model needs no mask for it.
        starts: [3, B], position whose logits predict the first answer token.
        rows: [N], sample of each answer position.
        offsets: [N], its place in the answer.
        targets: [N], the token there.
        lengths: [B], answer lengths L_y.
        weights: [B], weight of each sample in the loss.
        labelled: [B] bool, whether the answer is gold: without one there is no hard loss.
        common: [B], tokens that the prompts under x1 and x2 begin with alike; at least one of each is left out.
        pixels: pixel_values [patches, values] and image_grid_thw [images, 3] of the images of all samples in order;
            empty without images. The levels of a question show the same ones.
    """

    input_ids: tuple[Tensor, ...]
    starts: Tensor
    rows: Tensor
    offsets: Tensor
    targets: Tensor
    lengths: Tensor
    weights: Tensor
    labelled: Tensor
    common: Tensor
    pixels: Mapping[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device | str) -> MicroBatch:
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(
            self,
            input_ids=tuple(ids.to(device) for ids in self.input_ids),
            pixels={name: value.to(device) for name, value in self.pixels.items()},
            **moved,
        )


def collate(examples: Sequence[Example], weights: Sequence[float]) -> MicroBatch:
    """Samples of unequal lengths as one microbatch. The padding token is 0; nothing ever reads it.

    An example may have `pixels`: the two tensors of its images, as in `MicroBatch`.
    """
    input_ids = []
    for level in range(N_LEVELS):
        rows = [torch.cat([example.prompts[level], example.answer[:-1]]).long() for example in examples]
        input_ids.append(nn.utils.rnn.pad_sequence(rows, batch_first=True))
    lengths = torch.tensor([len(example.answer) for example in examples])
    starts = [[len(example.prompts[level]) - 1 for example in examples] for level in range(N_LEVELS)]
    shown = [pixels for example in examples if (pixels := getattr(example, "pixels", None))]
    return MicroBatch(
        input_ids=tuple(input_ids),
        starts=torch.tensor(starts),
        rows=torch.repeat_interleave(torch.arange(len(examples)), lengths),
        offsets=torch.cat([torch.arange(int(length)) for length in lengths]),
        targets=torch.cat([example.answer for example in examples]).long(),
        lengths=lengths,
        weights=torch.tensor(weights, dtype=torch.float64),
        labelled=torch.tensor([example.labelled for example in examples]),
        common=torch.tensor([common_prefix(example.prompts[1], example.prompts[2]) for example in examples]),
        pixels={name: torch.cat([pixels[name] for pixels in shown]) for name in (shown[0] if shown else ())},
    )


def common_prefix(one: Tensor, other: Tensor) -> int:
    """How many tokens two prompts [n], [m] begin with alike, short of the last token of either.

    The last token of a prompt predicts the first of the answer, so each prompt must run at least that one by itself.
    """
    most = min(len(one), len(other)) - 1
    differ = (one[:most] != other[:most]).nonzero()
    return int(differ[0]) if len(differ) else most
