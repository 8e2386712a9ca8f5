"""How likely answers are to a model under x0, x1 and x2: the numbers, and bars of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from remind.core.errors import ConfigError, DataError
from remind.models.backbone import prompt_ids, tokenize
from remind.states.parquet import StateRecord
from remind.states.pyramid import LETTERS, LEVELS, one_line
from remind.viewing.plots.style import LEVEL_COLOURS
from sae.figures import Picture, new_figure

if TYPE_CHECKING:
    from remind.models.backbone import Backbone

Answers = Mapping[str, Mapping[str, float]]


@torch.no_grad()
def answer_probabilities(
    backbone: Backbone, record: StateRecord, candidates: Sequence[str] = (), levels: Sequence[str] = LEVELS
) -> dict[str, dict[str, float]]:
    """The probability that a model's answer begins with each of several, by level.

    That of y* up to the end of the candidate: the product over the tokens of `<answer>` and the candidate. An answer of
    which another one is the beginning counts for both. What is missing to 1 goes to all other answers.

    Args:
        record: the states of a question.
        candidates: what may stand between the tags; none: the option letters of a single choice.

    Raises:
        ConfigError: no candidates, for a question that is no single choice, or a model that does not generate.
        DataError: no such level.
    """
    names = list(candidates) or list(LETTERS[: len(record.options)]) * (record.format == "single")
    if not names:
        raise ConfigError(f"{record.question_id} is no single choice: say which answers to look at")
    if not backbone.causal:
        raise ConfigError(f"{backbone.name} does not generate: it gives no answer a probability")
    return {level: _likely(backbone, record.level(level).text, names) for level in levels}


def _likely(backbone: Backbone, prompt: str, names: Sequence[str]) -> dict[str, float]:
    before = prompt_ids(backbone.tokenizer, prompt)
    found = {}
    for name in names:
        # with what follows, for that decides where a tokenizer parts the end of the candidate
        whole = tokenize(backbone.tokenizer, f"<answer>{name}</answer><explanation></explanation>")
        end = len(f"<answer>{name}")
        answer = [token for token, (start, _) in zip(whole.ids, whole.offsets, strict=True) if start < end]
        ids = torch.tensor([[*before, *answer]], device=backbone.device)
        logits = backbone.model(input_ids=ids, use_cache=False).logits[0, len(before) - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(-1, ids[0, len(before) :, None])
        found[name] = float(chosen.sum().exp())
    return found


def plot_answers(runs: Mapping[str, Answers], right: Sequence[str] = (), title: str = "") -> Picture:
    """Bars of `answer_probabilities`, a panel for each model, a bar for each state; right answers in bold.

    Args:
        runs: by title, e.g. before and after training.
        right: the gold answers among the candidates.

    Raises:
        DataError: nothing to draw.
    """
    if not runs or not all(runs.values()):
        raise DataError("there are no probabilities to draw")
    figure = new_figure(3.4 * len(runs) + 0.6, 3)
    panels = figure.subplots(1, len(runs), squeeze=False, sharey=True)[0]
    for axes, (name, answers) in zip(panels, runs.items(), strict=True):
        candidates = list(next(iter(answers.values())))
        for number, (level, values) in enumerate(answers.items()):
            places = [place + (number - (len(answers) - 1) / 2) * 0.26 for place in range(len(candidates))]
            axes.bar(places, [values[one] for one in candidates], 0.24, color=LEVEL_COLOURS.get(level), label=level)
        axes.set_xticks(range(len(candidates)), candidates)
        for label, candidate in zip(axes.get_xticklabels(), candidates, strict=True):
            label.set_fontweight("bold" if candidate in right else "normal")
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_ylim(0, 1)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("probability of the answer")
    panels[-1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    if title:
        figure.suptitle(one_line(title).replace("$", r"\$"), fontsize=10, x=0.01, ha="left")
    return Picture(figure)
