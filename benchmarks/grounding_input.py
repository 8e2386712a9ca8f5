"""What the bench of grounding runs on: backbones of real shapes without real weights, and one long x0."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, cycle

from remind.data.dialogue import Dialogue, Image, Question, Session, Turn
from remind.models.backbone import Backbone
from remind.models.load import load_backbone
from remind.states.pyramid import FactualState, Segment, Strategy, render

#: Text decoders of Qwen3-VL as `nano_model` builds them, with random weights; only the vocabulary is smaller.
SHAPES: dict[str, dict[str, int]] = {
    "qwen3-vl-2b": {"hidden_size": 2048, "layers": 28, "heads": 16, "kv_heads": 8},
    "qwen3-vl-8b": {"hidden_size": 4096, "layers": 36, "heads": 32, "kv_heads": 8},
}
_STRATEGY = Strategy(
    (
        "Collect what is said about the habit and put it in order of time.",
        "Compare earlier and later statements and see what has changed.",
    ),
    speakers=("Mara",),
    entities=("running", "the morning", "coffee"),
    focus=("how the opinion changes",),
    scope=("since spring",),
)


def bench_backbone(name: str, dtype: str, device: str) -> Backbone:
    """A backbone by name, or a decoder of one of `SHAPES` with random weights.

    Raises:
        ModelError: see `load_backbone`.
    """
    if name not in SHAPES:
        return load_backbone(name, dtype=dtype, device=device)
    from remind.models.nano import nano_model

    nano = load_backbone("nano", dtype=dtype, device=device)
    model = nano_model(**SHAPES[name]).to(nano.device, nano.dtype)
    return Backbone(f"{name}, random weights", model, nano.tokenizer, nano.processor, nano.kind)


def bench_state(backbone: Backbone, tokens: int) -> FactualState:
    """x0 of as many turns of the bundled dialogues, one after the other and again, as `tokens` tokens hold."""
    from remind import read
    from remind.data.sample import sample_path

    corpus = read(sample_path())
    sessions: list[Session] = []
    used = images = 0
    for session in cycle([session for dialogue in corpus.dialogues for session in dialogue.sessions]):
        turns: list[Turn] = []
        for turn in session.turns:
            shown = tuple(Image(images + n, caption=image.caption) for n, image in enumerate(turn.images))
            images += len(shown)
            turns.append(Turn(f"{len(sessions)}:{len(turns)}", turn.speaker, turn.text, turn.time, shown))
            used += len(backbone.tokenize(turn.text).ids)
        sessions.append(Session(str(len(sessions)), session.time, tuple(turns)))
        if used >= tokens:
            break
    dialogue = Dialogue("bench", tuple(sessions))
    question = Question("bench", "bench", "How has the habit changed since spring?")
    ends = list(accumulate(len(session.turns) for session in sessions))

    def first(turns: int) -> FactualState:
        starts = [0, *ends[:-1]]
        held = [Segment(start, min(end, turns) - 1) for start, end in zip(starts, ends, strict=True) if start < turns]
        return FactualState(dialogue, question, tuple(held), _STRATEGY)

    def length(turns: int) -> int:
        return len(backbone.tokenize(render(first(turns)).text).ids)

    return first(max(1, bisect_right(range(1, ends[-1] + 1), tokens, key=length)))
