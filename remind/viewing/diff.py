"""What alignment changed: the same questions read by a model before and after, feature by feature and layer by layer.

Both models read x0; the model before also reads x2, which alignment taught from. All three prompts end in the
same tokens, the question, and go on with the same answer, so that hidden states can be compared there token by token.

- **features**: mean activation under x0 at question, answer and dialogue tokens, after minus before.
- **moved**: the share of the difference that x2 makes to the model before which the model after shows under x0,
  Σ⟨m, Δ⟩ / Σ|Δ|² with m = after(x0) - before(x0), Δ = before(x2) - before(x0): 1 where it arrived, 0 where it did not
  move that way. In the residual stream and in codes. Controls: Δ of a question of another dialogue, of means over the
  positions, beside the share of the question's own means; and in codes a random m, as long at every token: of entries
  at the edge of top-k any change exchanges some, as x2 does, so that the share is above 0 wherever it leads.
- **salience**: which turns the positions that answer read, without any marker: the probability that a turn with gold
  evidence gets more attention per token than one without (AUC; .5 is chance).
- **fit**: FVU of the SAEs on the streams before and after, and features that fire in one only: whether they must be
  trained anew.

The command `compare-models` writes that of a states folder as JSON, tables, a picture and a page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from math import isnan
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

import numpy as np
import torch
from markupsafe import Markup
from torch import Tensor, nn

from remind.alignment.examples import example_of
from remind.core.errors import ConfigError, DataError, ModelError
from remind.core.files import write_json, write_text
from remind.core.progress import track
from remind.core.run_folder import RunFolder
from remind.evaluation.statistics import bootstrap, ratio
from remind.evaluation.tables import markdown_table
from remind.grounding.codes import first_character
from remind.grounding.ground import check_saes, load_saes
from remind.models.attention import Attention, exchanged_attention
from remind.models.backbone import Backbone, inner_model, load_backbone
from remind.models.chat import prompt_tokens
from remind.models.generate import check_generates
from remind.states.dataset import iterate_states
from remind.states.pyramid import Rendered
from remind.states.records import StateRecord
from remind.viewing.config import CompareModelsConfig
from sae import SparseCodes, TopKSAE
from sae.dashboard import logit_effects
from sae.figures import COLOURS, Picture, new_figure
from sae.metrics import Evaluation
from sae.pages import page

Kind = Literal["question", "answer", "dialogue"]
KINDS: tuple[Kind, ...] = ("question", "answer", "dialogue")
#: Those that all levels share.
SHARED: tuple[Kind, ...] = ("question", "answer")
SPACES = ("residual", "codes", "random")
Moved = dict[str, dict[int, dict[Kind, tuple[float, float]]]]
#: Tokens whose state is longer than this many medians are attention sinks, which no SAE was trained on.
_SINK = 10.0


@dataclass(frozen=True)
class Reading:
    """One question as both models read it.

    Attributes:
        prompts: token ids under x0, x1 and x2.
        answer: token ids of y*, end token included.
        turn: int64 [tokens of x0's prompt], turn of each token or -1.
        evidence: turns of x0 with gold evidence.
        same: tokens in which all prompts end alike.
    """

    record: StateRecord
    prompts: tuple[Tensor, ...]
    answer: Tensor
    turn: Tensor
    evidence: list[int]
    same: int

    def ids(self, level: int) -> Tensor:
        """Prompt and answer without its last token: what is read to predict the answer."""
        return torch.cat([self.prompts[level], self.answer[:-1]]).long()

    def positions(self, kind: Kind, level: int) -> Tensor:
        """int64 positions in `ids`; those of the answer are where its tokens are predicted."""
        length = len(self.prompts[level])
        if kind == "answer":
            return torch.arange(length - 1, length - 1 + len(self.answer))
        if kind == "question":
            return torch.arange(length - self.same, length - 1)
        return (self.turn >= 0).nonzero().squeeze(-1)


def readings(backbone: Backbone, records: Iterable[StateRecord]) -> list[Reading]:
    """Those records that have a gold answer.

    Raises:
        DataError: none has, one is longer than the model takes, or x2 was not built.
    """
    found = []
    for record in records:
        example = example_of(backbone.tokenizer, record)
        if not len(example.answer):
            continue
        record.level("x2")
        if example.longest > backbone.max_length:
            raise DataError(
                f"{example.longest} tokens, but {backbone.name} takes {backbone.max_length}; build shorter states",
                record=record.question_id,
            )
        ends = [prompt.flip(0) for prompt in example.prompts]
        shortest = min(map(len, ends))
        alike = torch.stack([end[:shortest] == ends[0][:shortest] for end in ends]).all(0)
        same = int(alike.long().cumprod(0).sum())
        turn = _turn_of_tokens(backbone.tokenizer, record.x0)
        found.append(Reading(record, example.prompts, example.answer, turn, _evidence_turns(record), same))
    if not found:
        raise DataError("no question has a gold answer by which to compare the models")
    return found


def _turn_of_tokens(tokenizer: Any, rendered: Rendered) -> Tensor:
    """Index of the turn in which each prompt token's first character stands that is not white space, or -1; int64 [T].

    Raises:
        ModelError: a chat template that changes the text, so that its characters cannot be found again.
    """
    turn_at = np.full(len(rendered.text) + 1, -1, dtype=np.int64)
    for index, span in enumerate(rendered.turns):
        turn_at[span.start : span.end] = index
    # tokens of the chat template lie outside of the text, before and behind all turns
    offsets = np.clip(prompt_tokens(tokenizer, rendered.text).offsets, 0, len(rendered.text))
    return torch.from_numpy(turn_at[[first_character(rendered.text, (start, end)) for start, end in offsets]])


def _evidence_turns(record: StateRecord) -> list[int]:
    """Turns of x0 that hold gold evidence: the turns annotated, for visual questions those with a gold image."""
    if not record.visual:
        return [index for index, turn in enumerate(record.x0.turns) if turn.turn_id in set(record.evidence_found or ())]
    labels = [f"\n[Image #{image} Caption] " for image in record.images_found or ()]
    shown = [record.x0.text[turn.start : turn.end] for turn in record.x0.turns]
    return [index for index, text in enumerate(shown) if any(label in text for label in labels)]


def questions_of(
    backbone: Backbone, states: str, split: str | None, limit: int | None, per_dialogue: int | None
) -> list[Reading]:
    """The first questions of a states folder that have a gold answer, at most so many, and so many of each dialogue.

    Raises:
        DataError, FormatError: states that cannot be read; as `readings`.
    """
    seen: Counter[str] = Counter()

    def kept(record: StateRecord) -> bool:
        seen[record.dialogue_id] += bool(record.target)
        return bool(record.target) and (per_dialogue is None or seen[record.dialogue_id] <= per_dialogue)

    return readings(backbone, islice(filter(kept, iterate_states(states, split)), limit))


@dataclass
class Changes:
    """Sums over questions of one layer's feature activations at one kind of positions; [d_sae] each."""

    before: Tensor
    after: Tensor
    square: Tensor
    questions: int = 0

    def add(self, before: Tensor, after: Tensor) -> None:
        self.before += before
        self.after += after
        self.square += (after - before).square()
        self.questions += 1

    def top(self, n: int) -> list[dict[str, float]]:
        """The n features of largest |difference| in standard errors over questions (at least .01 of the largest)."""
        count = max(self.questions, 1)
        mean = (self.after - self.before) / count
        error = ((self.square / count - mean.square()).clamp(min=0) / count).sqrt()
        floor = 0.01 * float(error.max()) if len(error) else 0.0
        score = mean / (error + floor + 1e-12)
        order = score.abs().argsort(descending=True, stable=True)[:n]
        return [
            {
                "feature": int(j),
                "before": float(self.before[j] / count),
                "after": float(self.after[j] / count),
                "difference": float(mean[j]),
                "standard_errors": float(score[j]),
            }
            for j in order
            if mean[j] != 0
        ]


@dataclass
class Diff:
    """What `measure` found, by layer of the SAEs, in float64 on the CPU.

    Attributes:
        changes: features, by layer and kind.
        moved: of each question, by space (residual, codes; random: codes after a random change), layer and kind: ⟨m, Δ⟩
            and |Δ|² summed over positions.
        means: of each question, by layer and kind: means of m and Δ over positions, [2, d].
        attention: of each question: AUC before and after by layer of the model, [2, n_layers], NaN where a layer has no
            attention; None without gold turns beside others.
        fit: by layer: figures before and after.
    """

    questions: list[Reading]
    changes: dict[int, dict[Kind, Changes]]
    moved: list[Moved] = field(default_factory=list)
    means: list[dict[int, dict[Kind, Tensor]]] = field(default_factory=list)
    attention: list[Tensor | None] = field(default_factory=list)
    fit: dict[int, tuple[Evaluation, Evaluation]] = field(default_factory=dict)


@torch.no_grad()
def measure(
    before: Backbone,
    after: Backbone,
    saes: Mapping[int, TopKSAE],
    questions: Sequence[Reading],
    *,
    attention: bool = True,
) -> Diff:
    """Read every question with both models.

    Args:
        before, after: the same architecture and tokenizer.
        saes: by layer, on the models' device.
        questions: from `readings`.
        attention: whether attention to turns is measured.

    Raises:
        ModelError: models with other tokens, widths or layers, or whose attention cannot be read.
    """
    check_same(before, after)
    layers = list(saes)
    changes = {
        n: {kind: Changes(*torch.zeros(3, c.d_sae, dtype=torch.float64)) for kind in KINDS} for n, c in saes.items()
    }
    diff = Diff(list(questions), changes)
    diff.fit = {n: (Evaluation(c.d_in, c.d_sae), Evaluation(c.d_in, c.d_sae)) for n, c in saes.items()}
    generator = torch.Generator().manual_seed(0)
    for question in track(questions, "read", len(questions)):
        rows = len(question.answer) if attention else 0
        (first, *read), (second, *more) = (_states(one, question.ids(0), layers, rows) for one in (before, after))
        told, _ = _states(before, question.ids(2), layers)
        if attention:
            diff.attention.append(_attention(question, before.n_layers, (*read, *more)))
        moved: Moved = {space: {layer: {} for layer in layers} for space in SPACES}
        means: dict[int, dict[Kind, Tensor]] = {layer: {} for layer in layers}
        for layer, coder in saes.items():
            streams = (first[layer], second[layer])
            codes = []
            for stream, figures in zip(streams, diff.fit[layer], strict=True):
                found = coder.encode(stream)
                kept = _no_sink(stream)
                figures.add(stream[kept], coder.decode(found[kept]), found[kept])
                codes.append(SparseCodes(found.values * kept[:, None], found.indices))
            for kind in KINDS:
                at = question.positions(kind, 0).to(stream.device)
                if len(at):
                    before_after = (part[at].dense(coder.d_sae).mean(0).double().cpu() for part in codes)
                    changes[layer][kind].add(*before_after)
            for kind in SHARED:
                at, there = (question.positions(kind, level).to(stream.device) for level in (0, 2))
                m, delta = ((one - first[layer][at]).double() for one in (second[layer][at], told[layer][there]))
                moved["residual"][layer][kind] = _dots(m, delta)
                means[layer][kind] = torch.stack([m.mean(0), delta.mean(0)]).cpu()
                noise = torch.randn(m.shape, generator=generator).to(m)
                noise *= (torch.linalg.vector_norm(m, dim=1) / torch.linalg.vector_norm(noise, dim=1))[:, None]
                shaken = coder.encode(first[layer][at] + noise.to(stream))
                base, aligned, random, there_codes = (
                    part.dense(coder.d_sae).double()
                    for part in (codes[0][at], codes[1][at], shaken, coder.encode(told[layer][there]))
                )
                moved["codes"][layer][kind] = _dots(aligned - base, there_codes - base)
                moved["random"][layer][kind] = _dots(random - base, there_codes - base)
        diff.moved.append(moved)
        diff.means.append(means)
    return diff


def check_same(before: Backbone, after: Backbone) -> None:
    """Raises ModelError unless two models have the same tokens, width and layers."""
    shapes = [(one.n_layers, one.hidden_size, one.tokenizer.get_vocab()) for one in (before, after)]
    if shapes[0] != shapes[1]:
        what = "layers" if shapes[0][:2] != shapes[1][:2] else "tokens"
        raise ModelError(f"{after.name} has other {what} than {before.name}: one was not trained from the other")


def _dots(m: Tensor, delta: Tensor) -> tuple[float, float]:
    """⟨m, Δ⟩ and |Δ|²."""
    return float((m * delta).sum()), float(delta.square().sum())


def _states(
    backbone: Backbone, ids: Tensor, layers: Sequence[int], rows: int = 0
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Hidden states [T, d] by layer, in float32, and the mean attention [T] of all heads, from one forward.

    Args:
        rows: last tokens whose attention is read, of every layer that has any; 0: of none, and blocks above the
            deepest layer are not run.

    Raises:
        ModelError: attention that cannot be read.
    """
    read: dict[int, Tensor] = {}
    with ExitStack() as around:
        if rows:
            decoder = inner_model(backbone.model).get_decoder()
            around.enter_context(exchanged_attention(decoder, partial(_attend, rows, read), "set attention false"))
            layers = [*layers, backbone.n_layers]
        found = backbone.hidden_states(ids[None].to(backbone.device), None, layers, use_cache=False)
    if rows and not read:
        raise ModelError(f"no layer of {backbone.name} has attention that can be read: set attention false")
    return {layer: states[0].float() for layer, states in found.items()}, read


def _attend(
    rows: int,
    read: dict[int, Tensor],
    inner: Attention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """A layer's own attention, whose weights in the last rows are kept."""
    heads, own = query.shape[1] // key.shape[1], query[0, :, -rows:].float()
    scores = own @ key[0].float().repeat_interleave(heads, 0).mT * kwargs["scaling"]
    # where there is no mask attention is causal
    seen = torch.ones_like(scores[:1], dtype=torch.bool).tril(key.shape[2] - rows)
    if mask is not None:
        seen = mask[0, :, -rows:] if mask.dtype == torch.bool else mask[0, :, -rows:] == 0
    layer: Any = module.layer_idx
    read[layer + 1] = scores.masked_fill(~seen, -torch.inf).softmax(-1).mean((0, 1)).cpu().double()
    return inner(module, query, key, value, mask, **kwargs)


def _no_sink(h: Tensor) -> Tensor:
    """bool [T]."""
    norms = torch.linalg.vector_norm(h, dim=-1)
    return norms <= _SINK * norms.median()


def _attention(question: Reading, n_layers: int, read: Sequence[Mapping[int, Tensor]]) -> Tensor | None:
    """AUC of the attention per token that turns get, [2, n_layers]; NaN where a layer has no attention."""
    at, n_turns = question.positions("dialogue", 0), len(question.record.x0.turns)
    if not 0 < len(question.evidence) < n_turns:
        return None
    sizes = torch.bincount(question.turn[at], minlength=n_turns).clamp(min=1)
    figures = torch.full((2, n_layers), torch.nan, dtype=torch.float64)
    for row, by_layer in enumerate(read):
        for layer, weights in by_layer.items():
            turns = torch.zeros(n_turns, dtype=torch.float64).index_add_(0, question.turn[at], weights[at])
            figures[row, layer - 1] = auc(turns / sizes, question.evidence)
    return figures


def auc(values: Tensor, gold: Sequence[int]) -> float:
    """Probability that a gold turn has a higher value than another, ties half."""
    is_gold = torch.zeros(len(values), dtype=torch.bool)
    is_gold[list(gold)] = True
    high, low = values[is_gold][:, None], values[~is_gold]
    return float(((high > low).double() + 0.5 * (high == low).double()).mean())


Figures = dict[str, Any]


def compare_models(cfg: CompareModelsConfig) -> Figures:
    """Compare two models, write `diff.json`, `diff.md`, `diff.png` and `diff.html`, print the tables.

    Returns what is written as JSON: `moved` and `moved_means` (shares of the way; controls `random` and `shuffled`),
    `salience` (AUC before, after, difference), `features`, `fit`.

    Raises:
        ConfigError: files exist already.
        DataError, FormatError: states that cannot be read, or without gold answers.
        ModelError: models or SAEs that cannot be read or do not fit each other.
    """
    out = Path(cfg.out)
    RunFolder(out).check(resume=True)
    if (out / "diff.json").exists() and not cfg.overwrite:
        raise ConfigError(f"{out / 'diff.json'} exists; choose another out or set overwrite")
    saes, _ = load_saes(cfg.sae, cfg.device)
    before = load_backbone(cfg.before, dtype=cfg.dtype, device=cfg.device)
    check_generates(before)
    check_saes(before, saes, folder=cfg.sae)
    after = load_backbone(cfg.after, dtype=cfg.dtype, device=cfg.device)
    questions = questions_of(before, cfg.states, cfg.split, cfg.limit, cfg.per_dialogue)
    diff = measure(before, after, saes, questions, attention=cfg.attention)
    result = {"config": asdict(cfg), "questions": len(questions), **figures_of(diff, cfg.features, cfg.resamples)}
    name_features(result, before, saes)
    text, picture = markdown(result), plot(result)
    picture.save(out / "diff.png")
    write_text(out / "diff.md", text)
    values: Figures = {"title": _title(result), "drawn": Markup(picture.svg()), "tables": tables(result)}
    write_text(out / "diff.html", page("remind.viewing", "diff.html.j2", **values))
    write_json(out / "diff.json", result)
    print(text)
    return result


def figures_of(diff: Diff, features: int = 20, resamples: int = 2000) -> Figures:
    """All figures of a comparison, intervals by dialogue."""
    dialogues = [question.record.dialogue_id for question in diff.questions]

    moved: Figures = {space: {str(layer): {} for layer in diff.changes} for space in SPACES}
    means: Figures = {str(layer): {} for layer in diff.changes}
    others = _of_another_dialogue(dialogues)
    for layer in diff.changes:
        for kind in SHARED:
            for space, by_layer in moved.items():
                own = [one[space][layer][kind] for one in diff.moved]
                by_layer[str(layer)][kind] = ratio(own, dialogues, resamples)
            sides = [one[layer][kind] for one in diff.means]
            pairs = {"own": [_dots(m, delta) for m, delta in sides]}
            if others is not None:
                pairs["shuffled"] = [_dots(m, sides[n][1]) for (m, _), n in zip(sides, others, strict=True)]
            means[str(layer)][kind] = {name: ratio(own, dialogues, resamples) for name, own in pairs.items()}
    attention: Figures = {}
    read = [(one, name) for one, name in zip(diff.attention, dialogues, strict=False) if one is not None]
    if read:
        columns = {str(n): [one[:, n - 1] for one, _ in read] for n in range(1, read[0][0].shape[1] + 1)}
        columns["mean"] = [one.nanmean(1) for one, _ in read]
        for column, values in columns.items():
            # some layers of hybrid models have no attention
            if not isnan(values[0][0]):
                rows = [(*pair.tolist(), name) for pair, (_, name) in zip(values, read, strict=True)]
                attention[column] = _paired(rows, resamples)
    fit = {}
    for layer, (first, second) in diff.fit.items():
        born, dead = (second.fired > 0) & (first.fired == 0), (second.fired == 0) & (first.fired > 0)
        names = ("tokens", "fvu", "cosine", "l0", "dead")
        kept = [{name: value for name, value in one.summary().items() if name in names} for one in (first, second)]
        fit[str(layer)] = {"before": kept[0], "after": kept[1], "born": int(born.sum()), "gone": int(dead.sum())}
    listed = {
        str(layer): {kind: changes.top(features) for kind, changes in kinds.items()}
        for layer, kinds in diff.changes.items()
    }
    return {"moved": moved, "moved_means": means, "salience": {"attention": attention}, "fit": fit, "features": listed}


def name_features(result: Figures, backbone: Backbone, saes: dict[int, TopKSAE]) -> None:
    """Give each listed feature the tokens that it promotes."""
    for layer, kinds in result["features"].items():
        rows = [row for listed in kinds.values() for row in listed]
        numbers = [row["feature"] for row in rows]
        effects = logit_effects(backbone.model, backbone.tokenizer, saes[int(layer)], numbers, 5) if rows else None
        for row, one in zip(rows, effects or [], strict=False):
            row["promotes"] = [token for token, _ in one.promoted]


def _of_another_dialogue(dialogues: Sequence[str]) -> list[int] | None:
    """For each question one of another dialogue, half of all further in an order by dialogue; None for one dialogue."""
    if len(set(dialogues)) < 2:
        return None
    order = sorted(range(len(dialogues)), key=lambda number: dialogues[number])
    half = len(order) // 2
    chosen = dict[int, int]()
    for place, number in enumerate(order):
        later = (order[(place + half + step) % len(order)] for step in range(len(order)))
        chosen[number] = next(other for other in later if dialogues[other] != dialogues[number])
    return [chosen[number] for number in range(len(order))]


def _paired(rows: Sequence[tuple[float, float, str]], resamples: int) -> Figures:
    before, after, names = zip(*rows, strict=True)
    values = {"before": before, "after": after, "difference": [b - a for a, b in zip(before, after, strict=True)]}
    return {name: bootstrap(own, resamples, clusters=names) for name, own in values.items()}


def tables(result: Figures) -> list[tuple[str, list[str], list[list[str]]]]:
    """The figures as tables: title, heads and rows."""
    moved = []
    for layer, kinds in result["moved"]["residual"].items():
        for kind in kinds:
            means = result["moved_means"][layer][kind]
            cells = [result["moved"][space][layer][kind] for space in SPACES]
            moved.append([layer, kind, *map(_cell, [*cells, means["own"], means.get("shuffled")])])
    salience = [
        [layer, *(_cell(figures[part]) for part in ("before", "after", "difference"))]
        for layer, figures in result["salience"]["attention"].items()
    ]
    fit = []
    for layer, one in result["fit"].items():
        cells = [f"{one[when][name]:.3f}" for name in ("fvu", "l0") for when in ("before", "after")]
        fit.append([layer, *cells, str(one["born"]), str(one["gone"])])
    found = [
        (
            "Share of the way from x0 to x2 of the model before which the model after has gone under x0",
            ["layer", "tokens", "residual", "codes", "codes, random change", "means, residual", "another question's"],
            moved,
        ),
        (
            "Attention where answers are predicted: AUC of turns with gold evidence among those of x0",
            ["layer", "before", "after", "after - before"],
            salience,
        ),
        ("The SAEs on both streams", ["layer", "FVU before", "after", "L0 before", "after", "born", "gone"], fit),
    ]
    for layer, kinds in result["features"].items():
        for kind, listed in kinds.items():
            rows = []
            for row in listed:
                promoted = " ".join(shorten(repr(token), 24, placeholder="…'") for token in row.get("promotes", []))
                numbers = [f"{row['before']:.3f}", f"{row['after']:.3f}", f"{row['standard_errors']:+.1f}"]
                rows.append([str(row["feature"]), *numbers, promoted])
            heads = ["feature", "before", "after", "standard errors", "promotes"]
            found.append((f"Layer {layer}, {kind} tokens", heads, rows))
    return found


def markdown(result: Figures) -> str:
    """The tables as Markdown."""
    parts = [f"# {_title(result)}\n"]
    for title, heads, rows in tables(result):
        parts.append(
            f"{title}:\n\n" + markdown_table(heads, [[cell.replace("|", "\\|") for cell in row] for row in rows])
        )
    return "\n".join(parts)


def _title(result: Figures) -> str:
    return f"What training changed, {result['questions']} questions"


def _cell(figures: Figures | None) -> str:
    if figures is None or figures["value"] is None:
        return "–"
    return f"{figures['value']:.3f} [{figures['low']:.3f}, {figures['high']:.3f}]"


def plot(result: Figures) -> Picture:
    """Shares moved by layer with their control, and salience before and after."""
    figure = new_figure(11, 3.6)
    left, right = figure.subplots(1, 2)
    layers = list(result["moved_means"])
    rows = [("residual, answer", COLOURS[0], [result["moved"]["residual"][n]["answer"] for n in layers])]
    rows += [("codes, answer", COLOURS[2], [result["moved"]["codes"][n]["answer"] for n in layers])]
    rows += [("codes, random change", "#bbbbbb", [result["moved"]["random"][n]["answer"] for n in layers])]
    shuffled = [result["moved_means"][n]["answer"].get("shuffled") for n in layers]
    if all(shuffled):
        rows += [("another question's", "#999999", shuffled)]
    for name, colour, figures in rows:
        known = [(n, one) for n, one in zip(layers, figures, strict=True) if one["value"] is not None]
        values = [one["value"] for _, one in known]
        errors = [[one["value"] - one["low"] for _, one in known], [one["high"] - one["value"] for _, one in known]]
        left.errorbar([n for n, _ in known], values, yerr=errors, color=colour, label=name, marker="o", capsize=3)
    known = [(n, one) for n, one in result["salience"]["attention"].items() if n != "mean"]
    for name, colour in (("before", "#999999"), ("after", COLOURS[0])):
        right.plot(
            [n for n, _ in known], [one[name]["value"] for _, one in known], color=colour, label=name, marker="o"
        )
    for axes, none, label in ((left, 0, "share of the way"), (right, 0.5, "AUC of gold turns, attention")):
        axes.axhline(none, color="#cccccc", linewidth=0.8)
        axes.set_xlabel("layer")
        axes.set_ylabel(label)
        axes.legend(frameon=False, fontsize=8)
    return Picture(figure)
