"""What each condition shows of a question, against prompts made by the renderer from states written out by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from remind.core.errors import ConfigError, DataError
from remind.core.files import input_hashes
from remind.data.dialogue import Corpus, Dialogue, Image, Question, Session, Turn
from remind.data.readers import write_refmem
from remind.evaluation.answerers import FixedAnswers
from remind.evaluation.config import ContextConfig, EvaluateConfig
from remind.evaluation.contexts import Asked, Context, Contexts, Prompt, Prompter, control, most_frequent
from remind.evaluation.run import run_evaluation
from remind.models.generate import Generation
from remind.perception.auxiliary import OfflineLLM
from remind.states import pyramid
from remind.states.dataset import write_states
from remind.states.pyramid import AttentionalState, FactualState, ReflectiveState, Segment, Strategy
from remind.states.records import StateRecord, record_of

STRATEGY = Strategy(("Look at dates.", "Then count."), ("Ana", "Bo"), ("the dog; its bed",), (), ("last May",))
#: Three sessions of five turns; an image in turns 2 and 11. Turn n says n + 1 words.
IMAGES = {2: (Image(0, caption="a red kite"),), 11: (Image(1),)}
TURNS = [
    Turn(f"t{n}", "Ana" if n % 2 else "Bo", " ".join([f"w{n}"] * (n + 1)), images=IMAGES.get(n, ())) for n in range(15)
]
DIALOGUE = Dialogue("d", tuple(Session(f"s{k}", f"day {k}", tuple(TURNS[5 * k : 5 * k + 5])) for k in range(3)))
QUESTION = Question(
    "q", "d", "what of w7 and w8?", answers=("so",), evidence=("t7", "t13"), category=4, time="1 May", split="test"
)
FACTUAL = FactualState(DIALOGUE, QUESTION, (Segment(1, 2), Segment(6, 8)), STRATEGY)
ATTENTIONAL = AttentionalState(FACTUAL, ((0, 1), (3, 3), (4, 4)), (1.0, 0.5, 0.0, 2.0, 3.0))
RECORD = record_of(ReflectiveState(ATTENTIONAL, "because\nof w7"), "test")
WORDS = FixedAnswers("none", Generation("<answer>so</answer>", 0, finished=True))


class Words:
    """A token is a word; a text's vector counts its words w0 to w14."""

    def __init__(self, *_: object) -> None:
        pass

    def count_many(self, texts: Sequence[str]) -> list[int]:
        return [len(text.split()) for text in texts]

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def encode(self, texts: Sequence[str]) -> torch.Tensor:
        counts = [[float(text.replace("?", "").split().count(f"w{n}")) for n in range(15)] for text in texts]
        return torch.nn.functional.normalize(torch.tensor(counts).reshape(-1, 15), dim=-1)


class Told:
    """Summaries that say what the state shows."""

    def __init__(self) -> None:
        self.asked: list[AttentionalState] = []

    def kinds(self, questions: Sequence[Question]) -> list[str | None]:
        return ["belief_modeling" for _ in questions]

    def summaries(self, states: Sequence[AttentionalState]) -> list[str]:
        self.asked += states
        return [f"{len(state.blocks)} blocks" for state in states]


def prompt_of(name: str, question: Question = QUESTION, **context: object) -> Prompt:
    attentional = replace(ATTENTIONAL, factual=replace(FACTUAL, question=question))
    record = record_of(ReflectiveState(attentional, "because\nof w7"), "test")
    prompter = Prompter(partial(Contexts, Words(), ContextConfig(**context)), Told())  # type: ignore[arg-type]
    (prompt,) = prompter.prompts(name, Asked([record], DIALOGUE, [question]))
    return prompt


def page(positions: Sequence[int], strategy: Strategy = Strategy(())) -> pyramid.Rendered:  # noqa: B008
    return pyramid.render(FactualState(DIALOGUE, QUESTION, pyramid.segments_of(DIALOGUE, positions), strategy))


def rendered(positions: Sequence[int], strategy: Strategy = Strategy(())) -> str:  # noqa: B008
    return page(positions, strategy).text


def dialogue_tokens(positions: Sequence[int]) -> int:
    """Counted on the rendered page, not from parts."""
    whole = page(positions)
    return len(whole.text[slice(*whole.dialogue)].split())


def test_levels_evidence_no_context_and_oracle_are_what_the_renderer_gives() -> None:
    assert [prompt_of(level).text for level in ("x0", "x1", "x2")] == [RECORD.x0.text, RECORD.x1.text, RECORD.x2.text]
    assert prompt_of("evidence").text == rendered([1, 2, 6, 7, 8])
    assert prompt_of("no_context").text == rendered([])
    assert (prompt_of("oracle").text, prompt_of("oracle").evidence) == (rendered([7, 13], STRATEGY), ("t7", "t13"))
    visual = replace(QUESTION, evidence=(), images=(1,), dimension="personalized_visual_baselines")
    bare = replace(QUESTION, evidence=())
    shown, left_out = (prompt_of("oracle", own) for own in (visual, bare))
    assert (shown.images, left_out.left_out, left_out.text) == ((1,), "no gold evidence", "")


@pytest.mark.parametrize("cap", [1, 20, 100, 10_000])
def test_full_context_keeps_the_most_turns_that_fit_and_counts_the_rest(cap: int) -> None:
    prompt = prompt_of("full_context", full_tokens=cap)
    kept = range(prompt.cut_turns, 15)
    assert prompt.text == rendered(kept)
    guided = prompt_of("full_context_strategy", full_tokens=cap)
    assert guided == replace(prompt, text=rendered(kept, STRATEGY))
    assert dialogue_tokens(kept) <= cap or len(kept) == 1
    assert len(kept) == 15 or dialogue_tokens(range(kept.start - 1, 15)) > cap
    assert prompt.evidence == tuple(t for t in ("t7", "t13") if int(t[1:]) in kept)


def test_rag_takes_chunks_by_cosine_up_to_the_cap_of_x0() -> None:
    whole = page(range(15))
    costs = [len(whole.text[span.start : span.end].split()) for span in whole.turns]
    by_hand: list[list[int]] = []
    for position, cost in enumerate(costs):
        same = by_hand and by_hand[-1][0] // 5 == position // 5
        if same and sum(costs[p] for p in by_hand[-1]) + cost <= 20:
            by_hand[-1].append(position)
        else:
            by_hand.append([position])
    vectors = Words().encode([" ".join(DIALOGUE.turns[p].text for p in chunk) for chunk in by_hand])
    cosines = (vectors @ Words().encode([QUESTION.text])[0]).tolist()
    kept: list[int] = []
    for number in sorted(range(len(by_hand)), key=lambda n: -cosines[n]):
        wider = sorted([*kept, *by_hand[number]])
        if kept and dialogue_tokens(wider) > dialogue_tokens([1, 2, 6, 7, 8]):
            break
        kept = wider
    assert {7, 8} <= set(kept)
    assert prompt_of("rag", chunk_tokens=20).text == rendered(kept)
    # the strategy of x0 stands where it stands there
    assert prompt_of("rag_strategy", chunk_tokens=20).text == rendered(kept, STRATEGY)


def test_altered_order_summarises_x0_and_marks_afterwards() -> None:
    llm = Told()
    (prompt,) = Prompter(None, llm, "infer").prompts("altered", Asked([RECORD], DIALOGUE, [QUESTION]))  # type: ignore[arg-type]
    # one block for each of x0's two runs, so that no turn is singled out; the prompt has the markers of x1
    assert prompt.text == pyramid.render(ReflectiveState(ATTENTIONAL, "2 blocks")).text
    asked = llm.asked[0].factual.question
    assert (llm.asked[0].blocks, asked.answers, asked.evidence) == (((0, 1), (2, 4)), (), ())
    assert asked.dimension == "belief_modeling"


def test_other_dialogues_are_refused() -> None:
    changed = Dialogue("d", tuple(replace(s, time="another day") for s in DIALOGUE.sessions))
    with pytest.raises(DataError, match=r"\[q\]: x0 cannot be rebuilt"):
        Prompter(None, Told()).prompts("altered", Asked([RECORD], changed, [QUESTION]))  # type: ignore[arg-type]


class Newest:
    """The newest turn; sees no gold."""

    def context(self, question: Question, dialogue: Dialogue) -> Context:
        assert (question.answers, question.evidence, question.category) == ((), (), None)
        turn = dialogue.turns[-2]
        return Context(f"{turn.speaker}: {turn.text}", (turn.id,))


def test_an_evaluation_with_the_files_of_the_states_and_a_provider_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remind.models.encoder.SentenceEncoder", Words)
    path, states, corpus = tmp_path / "talk.jsonl", tmp_path / "states", Corpus((DIALOGUE,), (QUESTION,))
    write_refmem(corpus, path)
    write_states(states, [RECORD], {"inputs": input_hashes([path]), "llm": "none"})
    names = ["x0", "full_context", "oracle", "rag", "altered", "newest"]
    cfg = EvaluateConfig(str(states), "m", str(tmp_path / "out"), conditions=names, bootstrap=5)
    cfg.context = ContextConfig(full_tokens=60, chunk_tokens=20)

    def recalls(cfg: EvaluateConfig, **given: Any) -> list[float]:
        given = {"answerer": WORDS, "llm": OfflineLLM(), "providers": {"newest": Newest()}, **given}
        parts = run_evaluation(cfg, **given)["conditions"].values()
        return [part["overall"]["evidence_recall"]["value"] for part in parts]

    with pytest.raises(ConfigError, match=r"no condition 'newest'; there are no_context, .*abstain"):
        recalls(cfg, providers={})
    with pytest.raises(ConfigError, match="full_context needs the dialogues: set corpus"):
        recalls(cfg)
    cfg.corpus = [str(path)]
    assert recalls(cfg) == pytest.approx([0.5, 0.5, 1.0, 0.5, 0.5, 0.5])
    path.write_text(path.read_text().replace("w7 w7", "w7  w7"))
    with pytest.raises(DataError, match=r"talk.jsonl is not a file that they were built from, or has changed since"):
        recalls(cfg)
    # dialogues alone serve, too
    alone = EvaluateConfig("", "m", str(tmp_path / "alone"), conditions=["no_context", "oracle", "newest"], bootstrap=5)
    assert recalls(alone, data=corpus) == [0.0, 1.0, 0.5]
    with pytest.raises(ConfigError, match="x0 needs states"):
        recalls(replace(alone, conditions=["x0"], out=str(tmp_path / "no")), data=corpus)


def test_a_context_stands_where_x0_has_the_dialogue() -> None:
    (prompt,) = Prompter(providers={"newest": Newest()}).prompts("newest", Asked([RECORD], DIALOGUE, [QUESTION]))
    line, x0 = f"{DIALOGUE.turns[13].speaker}: {DIALOGUE.turns[13].text}\n", RECORD.x0.text
    assert prompt.text == x0[: RECORD.x0.dialogue[0]] + line + x0[x0.index("\nAsked on: 1 May") :]


def test_controls(make_record: Callable[..., StateRecord]) -> None:
    options = ("red", "There is no information on it", "blue")
    training = [make_record(f"t{n}", "train", answers=own) for n, own in enumerate((("Paris",), ("Rome",), ("Rome",)))]
    training.append(make_record("t4", "train", format="multi", options=options, answers=("C", "A")))
    asked = [make_record("d")]
    asked += [make_record(name, format=name, options=options, answers=("B",)) for name in ("single", "multi")]
    frequent = most_frequent(training)
    assert frequent == {"direct": "Rome", "multi": "A,C"}
    for name, expected in (
        ("always_a", ["no options", "A", "[A]"]),
        ("most_frequent", ["Rome", "no training answer of its format", "[A,C]"]),
        ("abstain", ["No information available", "B", "[B]"]),
    ):
        prompts = [control(name, record, frequent) for record in asked]
        assert [p.left_out or (p.output.text if p.output else "")[8:].split("<")[0] for p in prompts] == expected


def test_what_is_no_context_is_told_in_a_line() -> None:
    provider = SimpleNamespace(context=lambda question, dialogue: None, name="bad")
    with pytest.raises(DataError, match=r"\[q\]: context provider bad gave NoneType, not a Context with text"):
        Prompter(providers={"bad": provider}).prompts("bad", Asked([RECORD], DIALOGUE, [QUESTION]))
