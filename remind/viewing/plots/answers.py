"""What a model would say: how likely answers are under x0, x1 and x2, and next tokens under steering."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from remind.core.errors import ConfigError, DataError
from remind.states.pyramid import LETTERS, LEVELS, one_line
from remind.viewing.plots.trajectory import LEVEL_COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from remind.models.backbone import Backbone
    from remind.states.records import StateRecord
    from sae.figures import Picture

Answers = Mapping[str, Mapping[str, float]]


def answer_probabilities(
    backbone: Backbone, record: StateRecord, candidates: Sequence[str] = ()
) -> dict[str, dict[str, float]]:
    """The probability that a model's answer begins with each candidate, by level.

    It is the product over the tokens of `<answer>` and the candidate. An answer that begins with two candidates counts
    for both. What is missing to 1 is the probability of all other answers.

    Args:
        record: the states of a question.
        candidates: texts between the answer tags; none: the option letters of a single-choice question.

    Raises:
        ConfigError: no candidates for a question of another format, or a model that does not generate.
    """
    names = list(candidates) or list(LETTERS[: len(record.options)]) * (record.format == "single")
    if not names:
        raise ConfigError(f"{record.question_id} is not a single-choice question: give candidates")
    if not backbone.causal:
        raise ConfigError(f"{backbone.name} does not generate: it gives no answer a probability")
    prompts = {level: record.level(level).text for level in LEVELS}
    return {level: {name: _probability(backbone, text, name) for name in names} for level, text in prompts.items()}


def _probability(backbone: Backbone, prompt: str, name: str) -> float:
    import torch

    from remind.models.chat import prompt_ids, tokenize

    before = prompt_ids(backbone.tokenizer, prompt)
    # the closing tag is tokenized with it, because it decides where a tokenizer splits the end of the candidate
    whole = tokenize(backbone.tokenizer, f"<answer>{name}</answer><explanation></explanation>")
    end = len(f"<answer>{name}")
    answer = [token for token, (start, _) in zip(whole.ids, whole.offsets, strict=True) if start < end]
    ids = torch.tensor([[*before, *answer]], device=backbone.device)
    with torch.no_grad():
        logits = backbone.model(input_ids=ids, use_cache=False).logits[0, len(before) - 1 : -1].float()
    return float(logits.log_softmax(-1).gather(-1, ids[0, len(before) :, None]).sum().exp())


def plot_answers(runs: Mapping[str, Answers], right: Sequence[str] = (), title: str = "") -> Picture:
    """Bars of `answer_probabilities`: a panel for each model, a bar for each state, gold answers in bold.

    Args:
        runs: by title, e.g. before and after training.
        right: the gold answers among the candidates.

    Raises:
        DataError: nothing to draw.
    """
    from sae.figures import Picture, new_figure

    if not runs or not all(runs.values()):
        raise DataError("there are no probabilities to draw")
    figure = new_figure(3.4 * len(runs) + 0.6, 3)
    panels = figure.subplots(1, len(runs), squeeze=False, sharey=True)[0]
    for axes, (name, answers) in zip(panels, runs.items(), strict=True):
        candidates = list(next(iter(answers.values())))
        rows = {level: [values[candidate] for candidate in candidates] for level, values in answers.items()}
        _grouped_bars(axes, candidates, rows, [LEVEL_COLOURS.get(level) for level in rows])
        for label in axes.get_xticklabels():
            label.set_fontweight("bold" if label.get_text() in right else "normal")
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_ylim(0, 1)
    panels[0].set_ylabel("probability of the answer")
    panels[-1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    if title:
        figure.suptitle(one_line(title).replace("$", r"\$"), fontsize=10, x=0.01, ha="left")
    return Picture(figure)


def plot_next(
    backbone: Backbone,
    prompt: str,
    under: Mapping[str, AbstractContextManager[Any]],
    start: str = "<answer>",
    n: int = 6,
) -> Picture:
    """The probability of the next token of a model's answer, under edits of its residual stream.

    Args:
        prompt: the user's message, e.g. `render(state).text`.
        under: by name, `sae.probe.steer(...)` and `ablate(...)`, each good for one call; `nullcontext()` for no edit.
        start: what the answer begins with.
        n: tokens shown, those with the largest probability under any edit.

    Raises:
        ConfigError: nothing to compare, or a model that does not generate.
    """
    import torch

    from remind.models.chat import prompt_ids, tokenize
    from sae.figures import COLOURS, Picture, new_figure

    if not under or not backbone.causal:
        raise ConfigError("plot_next needs a causal model and at least one way to run it")
    ids = [*prompt_ids(backbone.tokenizer, prompt), *tokenize(backbone.tokenizer, start).ids]
    inputs = torch.tensor([ids], device=backbone.device)
    rows = {}
    for name, edit in under.items():
        with torch.no_grad(), edit:
            rows[name] = backbone.model(input_ids=inputs, use_cache=False).logits[0, -1].float().softmax(-1).cpu()
    tokens = torch.stack(list(rows.values())).amax(0).topk(n).indices.tolist()
    figure = new_figure(max(5.0, 0.9 * n + 1.5), 2.8)
    axes = figure.subplots()
    labels = [repr(backbone.tokenizer.decode([token]))[1:-1].replace("$", r"\$") for token in tokens]
    _grouped_bars(axes, labels, {name: values[tokens].tolist() for name, values in rows.items()}, COLOURS)
    axes.set_ylabel("probability of the next token")
    axes.legend(frameon=False, fontsize=8)
    return Picture(figure)


def _grouped_bars(
    axes: Axes, labels: Sequence[str], rows: Mapping[str, Sequence[float]], colours: Sequence[str | None]
) -> None:
    """A group of bars for each label, with one bar for each row."""
    for number, (name, values) in enumerate(rows.items()):
        shift = (number - (len(rows) - 1) / 2) * 0.8 / len(rows)
        places = [place + shift for place in range(len(labels))]
        axes.bar(places, values, 0.75 / len(rows), color=colours[number % len(colours)], label=name)
    axes.set_xticks(range(len(labels)), labels)
    axes.spines[["top", "right"]].set_visible(False)
