"""What steering does to a model's next token."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from remind.core.errors import ConfigError
from remind.models.backbone import prompt_ids, tokenize
from sae.figures import COLOURS, Picture, new_figure

if TYPE_CHECKING:
    from remind.models.backbone import Backbone


@torch.no_grad()
def plot_next(
    backbone: Backbone,
    prompt: str,
    under: Mapping[str, AbstractContextManager[Any]],
    start: str = "<answer>",
    n: int = 6,
) -> Picture:
    """How likely tokens are to come next in a model's answer, as it is and under edits of its residual stream.

    Args:
        prompt: the user's message, e.g. `render(state).text`.
        under: by name, `sae.probe.steer(...)` and `ablate(...)`, each good for one call; `nullcontext()` for none.
        start: what the answer begins with.
        n: tokens shown: the likeliest ones under each, together.

    Raises:
        ConfigError: nothing to compare, or a model that does not generate.
    """
    if not under or not backbone.causal:
        raise ConfigError("plot_next needs a causal model and at least one way to run it")
    ids = [*prompt_ids(backbone.tokenizer, prompt), *tokenize(backbone.tokenizer, start).ids]
    inputs = torch.tensor([ids], device=backbone.device)
    found = {}
    for name, edit in under.items():
        with edit:
            found[name] = backbone.model(input_ids=inputs, use_cache=False).logits[0, -1].float().softmax(-1).cpu()
    tokens = torch.stack(list(found.values())).amax(0).topk(n).indices.tolist()
    figure = new_figure(max(5.0, 0.9 * n + 1.5), 2.8)
    axes = figure.subplots()
    for number, ((name, values), colour) in enumerate(zip(found.items(), COLOURS, strict=False)):
        shift = (number - (len(found) - 1) / 2) * 0.8 / len(found)
        places = [place + shift for place in range(len(tokens))]
        axes.bar(places, values[tokens].tolist(), 0.75 / len(found), color=colour, label=name)
    labels = [backbone.tokenizer.decode([token]).replace("$", r"\$") for token in tokens]
    axes.set_xticks(range(len(tokens)), [repr(label)[1:-1] for label in labels])
    axes.set_ylabel("probability of the next token")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return Picture(figure)
