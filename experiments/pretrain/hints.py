"""Auxiliary targets of the pre-training: what a reader has to know of a token on the way to the answer.

Small heads on an early layer read off each token of a remark who speaks, how the remark begins and whether it stands
between markers, and off options and answer who is asked about. A head on the last layer but one reads off each option
whether it is right, and its letter. One attention head of that layer is drawn to the remarks the answer rests on. The
heads are thrown away; with them letters are learned in minutes, which answers alone do not reach in that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.pretrain.course import Lesson
from remind.models.chat import tokenize
from remind.states import prompts
from remind.states.pyramid import MARKER
from remind.testbed.world import lexicon

_IGNORE = -1


class Hints(nn.Module):
    """The heads, and how their targets are read off the tokens.

    Args:
        decoder: the text model; its layers are hooked.
        remarks: layer after which remarks are read, from 1. options: the same for options; its attention is hooked too.
    """

    def __init__(self, tokenizer: Any, decoder: Any, hidden: int, remarks: int = 2, options: int = 3) -> None:
        super().__init__()
        self.scale = decoder.layers[0].self_attn.scaling
        bank = lexicon()

        def one(text: str) -> int:
            [index] = tokenize(tokenizer, text).ids
            return index

        self.speakers = {one(name): number for number, name in enumerate(bank["names"])}
        leads = [*bank["leads"], bank["flag"]]
        self.leads = {one(f"{lead}, "): number for number, lead in enumerate(leads, start=1)}
        self.colon = tokenize(tokenizer, f"{bank['names'][0]}: {bank['flag']}, ").ids[1]
        self.marker, self.line, self.image = one(f"{MARKER}\n"), one("\n"), one("[Image #")
        self.end = one(f"\nGuide to the question\n{prompts.render('strategy').strip()}\n")
        self.sizes = [len(self.speakers), len(leads) + 1, 2]
        self.of_remarks = nn.Linear(hidden, sum(self.sizes))
        self.of_asked = nn.Linear(hidden, len(self.speakers))
        self.names = {name: number for number, name in enumerate(bank["names"])}
        self.of_options = nn.Linear(hidden, 1)
        self.of_letters = nn.Linear(hidden, 4)
        self._hidden: dict[str, Any] = {}
        self._known: dict[int, Tensor] = {}
        for name, layer in (("remarks", remarks), ("options", options)):
            decoder.layers[layer - 1].register_forward_hook(self._keep(name))
        attention = decoder.layers[options - 1].self_attn
        attention.q_norm.register_forward_hook(self._keep("queries"))
        attention.k_norm.register_forward_hook(self._keep("keys"))
        decoder.rotary_emb.register_forward_hook(self._keep("rotation", whole=True))

    def _keep(self, name: str, whole: bool = False) -> Any:
        def hook(_: Any, __: Any, output: Any) -> None:
            self._hidden[name] = output[0] if isinstance(output, tuple) and not whole else output

        return hook

    def remarks(self, lesson: Lesson) -> Tensor:
        """[3, T] of the prompt: speaker, how the remark begins, whether it is marked; -1 outside remarks."""
        known = self._known.get(id(lesson))
        if known is None:
            known = self._known[id(lesson)] = torch.tensor(self._read(lesson.prompt.tolist()), dtype=torch.int8)
        return known

    def _read(self, ids: list[int]) -> list[list[int]]:
        found = [[_IGNORE] * len(ids) for _ in self.sizes]
        speaker: int | None = None
        marked = lead = 0
        for place, token in enumerate(ids):
            following = ids[place + 1] if place + 1 < len(ids) else None
            if token == self.end:
                break
            if token == self.marker:
                marked, speaker = 1 - marked, None
            elif token in self.speakers and following == self.colon:
                speaker, lead = self.speakers[token], self.leads.get(ids[place + 2], 0)
            elif speaker is not None and ids[place - 1] != self.colon:
                for values, value in zip(found, (speaker, lead, marked), strict=True):
                    values[place] = value
                if token == self.line and following != self.image:
                    speaker = None
        return found

    def forward(self, lessons: Sequence[Lesson]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean losses over the batch that went through the model last: remarks, focus, options, letters."""
        hidden = self._hidden["remarks"]
        width = hidden.shape[1]
        targets = torch.stack([F.pad(self.remarks(x), (0, width - len(x.prompt)), value=_IGNORE) for x in lessons], 1)
        inside = targets[0] != _IGNORE
        zero = hidden.new_zeros(())
        remarks = zero
        if inside.any():
            parts = self.of_remarks(hidden[inside]).split(self.sizes, -1)
            remarks = sum((F.cross_entropy(p, t[inside].long()) for p, t in zip(parts, targets, strict=True)), zero)
        rows = [row for row, lesson in enumerate(lessons) for _ in lesson.options]
        columns = [place for lesson in lessons for place, _ in lesson.options]
        # the answer is begun by one token; the next one tells
        reading = ([*range(len(lessons)), *rows], [*(len(lesson.prompt) for lesson in lessons), *columns])
        asked = torch.tensor([self.names[lessons[row].speaker] for row in reading[0]])
        remarks = remarks + F.cross_entropy(self.of_asked(hidden[reading]), asked)
        focus = self._focus(lessons, *reading)
        if not rows:
            return remarks, focus, zero, zero
        right = torch.tensor([float(is_right) for lesson in lessons for _, is_right in lesson.options])
        letters = torch.tensor([number for lesson in lessons for number in range(len(lesson.options))])
        chosen = self._hidden["options"][rows, columns]
        options = F.binary_cross_entropy_with_logits(self.of_options(chosen).squeeze(-1), right)
        return remarks, focus, options, F.cross_entropy(self.of_letters(chosen), letters)

    def _focus(self, lessons: Sequence[Lesson], rows: list[int], columns: list[int]) -> Tensor:
        """-log of what the first head pays, at the options and the answer, to the remarks the answer rests on."""
        pairs = [(row, column) for row, column in zip(rows, columns, strict=True) if len(lessons[row].focus)]
        queries, keys = self._hidden["queries"][:, :, 0], self._hidden["keys"][:, :, 0]
        if not pairs:
            return queries.new_zeros(())
        row, column = torch.tensor(pairs).T
        cos, sin = self._hidden["rotation"]
        cos, sin = cos.expand(len(lessons), -1, -1), sin.expand(len(lessons), -1, -1)
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
