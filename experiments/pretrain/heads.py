"""Auxiliary heads of the pre-training: what a reader has to know of a token on the way to the answer.

Heads on an early layer predict from each token of a remark who speaks, how the remark begins and whether it stands
between markers, and from options and answer who the target speaker is. A head on the last layer but one predicts from
each option whether it is right, and its letter. One attention head of that layer is drawn to the remarks the answer
rests on. The heads are thrown away; with them letters are learned in minutes, which answers alone do not reach in that
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.pretrain.lessons import Lesson
from remind.models.chat import tokenize
from remind.states import prompts
from remind.states.pyramid import MARKER
from remind.testbed.world import lexicon

_IGNORE = -1


class AuxiliaryHeads(nn.Module):
    """The heads, and how their targets are read off the tokens.

    Args:
        decoder: the text model; its layers are hooked.
        remarks: layer after which remarks are read, from 1. options: the same for options; its attention is hooked too.
    """

    def __init__(self, tokenizer: Any, decoder: Any, hidden: int, remarks: int = 2, options: int = 3) -> None:
        super().__init__()
        words = lexicon()
        leads = [*words["leads"], words["flag"]]

        def token(text: str) -> int:
            [index] = tokenize(tokenizer, text).ids
            return index

        self.names = {name: number for number, name in enumerate(words["names"])}
        self.speaker_tokens = {token(name): number for name, number in self.names.items()}
        self.lead_tokens = {token(f"{lead}, "): number for number, lead in enumerate(leads, start=1)}
        self.colon = tokenize(tokenizer, f"{words['names'][0]}: {words['flag']}, ").ids[1]
        self.marker, self.line, self.image = token(f"{MARKER}\n"), token("\n"), token("[Image #")
        self.end = token(f"\nGuide to the question\n{prompts.render('strategy').strip()}\n")
        self.sizes = [len(self.names), len(leads) + 1, 2]
        self.remark_head = nn.Linear(hidden, sum(self.sizes))
        self.speaker_head = nn.Linear(hidden, len(self.names))
        self.option_head = nn.Linear(hidden, 1)
        self.letter_head = nn.Linear(hidden, 4)
        self._outputs: dict[str, Any] = {}
        attention = decoder.layers[options - 1].self_attn
        self.scale = attention.scaling
        decoder.layers[remarks - 1].register_forward_hook(self._keep("remarks"))
        decoder.layers[options - 1].register_forward_hook(self._keep("options"))
        attention.q_norm.register_forward_hook(self._keep("queries"))
        attention.k_norm.register_forward_hook(self._keep("keys"))
        decoder.rotary_emb.register_forward_hook(self._keep("rotation"))

    def _keep(self, name: str) -> Any:
        def hook(_: Any, __: Any, output: Any) -> None:
            # older versions of a layer return a tuple; the rotation is one: cosine and sine
            self._outputs[name] = output[0] if isinstance(output, tuple) and name != "rotation" else output

        return hook

    def remark_targets(self, lesson: Lesson) -> Tensor:
        """[3, T] of the prompt: speaker, how the remark begins, whether it is marked; -1 outside remarks."""
        ids = lesson.prompt.tolist()
        targets = [[_IGNORE] * len(ids) for _ in self.sizes]
        speaker: int | None = None
        marked = lead = 0
        for place, token in enumerate(ids[: ids.index(self.end)]):
            following = ids[place + 1]
            if token == self.marker:
                marked, speaker = 1 - marked, None
            elif token in self.speaker_tokens and following == self.colon:
                speaker, lead = self.speaker_tokens[token], self.lead_tokens.get(ids[place + 2], 0)
            elif speaker is not None and ids[place - 1] != self.colon:
                for values, value in zip(targets, (speaker, lead, marked), strict=True):
                    values[place] = value
                if token == self.line and following != self.image:
                    speaker = None
        return torch.tensor(targets, dtype=torch.int8)

    def forward(self, lessons: Sequence[Lesson]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean losses over the batch that went through the model last: remarks, focus, options, letters."""
        hidden = self._outputs["remarks"]
        width = hidden.shape[1]
        targets = torch.stack(
            [F.pad(self.remark_targets(x), (0, width - len(x.prompt)), value=_IGNORE) for x in lessons], 1
        )
        inside = targets[0] != _IGNORE
        zero = hidden.new_zeros(())
        remarks = zero
        if inside.any():
            parts = self.remark_head(hidden[inside]).split(self.sizes, -1)
            remarks = sum((F.cross_entropy(p, t[inside].long()) for p, t in zip(parts, targets, strict=True)), zero)
        rows = [row for row, lesson in enumerate(lessons) for _ in lesson.options]
        columns = [place for lesson in lessons for place, _ in lesson.options]
        # the answer is begun by one token; the next one tells
        reading = ([*range(len(lessons)), *rows], [*(len(lesson.prompt) for lesson in lessons), *columns])
        speakers = torch.tensor([self.names[lessons[row].speaker] for row in reading[0]])
        remarks = remarks + F.cross_entropy(self.speaker_head(hidden[reading]), speakers)
        focus = self._focus(lessons, *reading)
        if not rows:
            return remarks, focus, zero, zero
        right = torch.tensor([float(is_right) for lesson in lessons for _, is_right in lesson.options])
        letters = torch.tensor([number for lesson in lessons for number in range(len(lesson.options))])
        chosen = self._outputs["options"][rows, columns]
        options = F.binary_cross_entropy_with_logits(self.option_head(chosen).squeeze(-1), right)
        return remarks, focus, options, F.cross_entropy(self.letter_head(chosen), letters)

    def _focus(self, lessons: Sequence[Lesson], rows: list[int], columns: list[int]) -> Tensor:
        """-log of the attention that the first head pays, at options and answer, to the words the answer rests on."""
        pairs = [(row, column) for row, column in zip(rows, columns, strict=True) if len(lessons[row].focus)]
        queries, keys = self._outputs["queries"][:, :, 0], self._outputs["keys"][:, :, 0]
        if not pairs:
            return queries.new_zeros(())
        row, column = torch.tensor(pairs).T
        cos, sin = (values.expand(len(lessons), -1, -1) for values in self._outputs["rotation"])
        keys = _rotate(keys, cos, sin)
        chosen = _rotate(queries[row, column], cos[row, column], sin[row, column])
        scores = torch.einsum("nd,ntd->nt", chosen, keys[row]) * self.scale
        later = torch.arange(keys.shape[1]) > column[:, None]
        log_share = scores.masked_fill(later, float("-inf")).log_softmax(-1)
        wanted = torch.zeros(len(lessons), keys.shape[1], dtype=torch.bool)
        for number, lesson in enumerate(lessons):
            wanted[number, lesson.focus.long()] = True
        return -log_share.masked_fill(~wanted[row], float("-inf")).logsumexp(-1).mean()


def _rotate(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, as Qwen3-VL applies it."""
    first, second = values.chunk(2, -1)
    return values * cos + torch.cat((-second, first), -1) * sin
