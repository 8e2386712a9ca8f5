"""What each condition shows of a question, against prompts made by the renderer from states written out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remind.core.errors import ConfigError, DataError
from remind.core.files import input_hashes, read_json
from remind.data.dialogue import NO_INFORMATION, Corpus, Dialogue, Image, Question, Session, Turn
from remind.data.readers import write_refmem
from remind.evaluation.answerers import FixedAnswers
from remind.evaluation.conditions import Asked, Prompt, Prompter, control, most_frequent, questions_of
from remind.evaluation.config import CONDITIONS, SETS, ContextConfig, EvaluateConfig
from remind.evaluation.contexts import Context, Contexts
from remind.evaluation.run import run_evaluation
from remind.llm.auxiliary import OfflineLLM
from remind.models.generate import Generation
from remind.states.dataset import write_states
from remind.states.pyramid import (
    AttentionalState,
    FactualState,
    ReflectiveState,
    Segment,
    Strategy,
    render,
    segments_of,
)
from remind.states.records import StateRecord, attentional_of, record_of, strategy_of

STRATEGY = Strategy(("Look at dates.", "Then count."), ("Ana", "Bo"), ("the dog; its bed",), (), ("last May",))


def make_dialogue() -> Dialogue:
    """Three sessions of five turns; an image in turns 2 and 11. Turn n says n + 1 words."""
    turns = [
        Turn(
            f"t{n}",
            "Ana" if n % 2 else "Bo",
            " ".join([f"w{n}"] * (n + 1)),
            images={2: (Image(0, caption="a red kite"),), 11: (Image(1),)}.get(n, ()),
        )
        for n in range(15)
    ]
    sessions = [Session(f"s{k}", f"day {k}", tuple(turns[5 * k : 5 * k + 5])) for k in range(3)]
    return Dialogue("d", tuple(sessions))


DIALOGUE = make_dialogue()
QUESTION = Question(
    "q", "d", "what of w7 and w8?", answers=("so",), evidence=("t7", "t13"), category=4, time="1 May", split="test"
)
FACTUAL = FactualState(DIALOGUE, QUESTION, (Segment(1, 2), Segment(6, 8)), STRATEGY)
ATTENTIONAL = AttentionalState(FACTUAL, ((0, 1), (3, 3), (4, 4)), (1.0, 0.5, 0.0, 2.0, 3.0))
RECORD = record_of(ReflectiveState(ATTENTIONAL, "because\nof w7"), "test")
VISUAL = replace(
    QUESTION,
    id="v",
    format="single",
    options=("yes", "no"),
    answers=("A",),
    evidence=(),
    images=(1,),
    dimension="personalized_visual_baselines",
)


class Words:
    """A token is a word; a text's vector counts its words w0 to w14."""

    name = "words"

    def count_many(self, texts: Sequence[str]) -> list[int]:
        return [len(text.split()) for text in texts]

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def encode(self, texts: Sequence[str]) -> torch.Tensor:
        counts = [[float(text.replace("?", "").split().count(f"w{n}")) for n in range(15)] for text in texts]
        rows = torch.tensor(counts) if counts else torch.zeros(0, 15)
        return rows / rows.norm(dim=-1, keepdim=True).clamp_min(1e-9)


class Told:
    """Summaries that say what the state shows."""

    name = "told"
    failures = ()

    def __init__(self) -> None:
        self.asked: list[AttentionalState] = []

    def kinds(self, questions: Sequence[Question]) -> list[str | None]:
        return ["belief_modeling" for _ in questions]

    def summaries(self, states: Sequence[AttentionalState]) -> list[str]:
        self.asked += states
        return [f"{len(state.blocks)} blocks" for state in states]


def prompt_of(
    name: str, record: StateRecord = RECORD, question: Question = QUESTION, llm: object = None, **context: object
) -> Prompt:
    contexts = Contexts(Words(), ContextConfig(**context))  # type: ignore[arg-type]
    prompter = Prompter(contexts, llm or Told())  # type: ignore[arg-type]
    (prompt,) = prompter.prompts(name, Asked([record], DIALOGUE, [question]))
    return prompt


def shown(name: str, record: StateRecord = RECORD, **context: object) -> str:
    return prompt_of(name, record, **context).text  # type: ignore[arg-type]


def rendered(positions: Sequence[int], strategy: Strategy = Strategy(())) -> str:  # noqa: B008
    segments = segments_of(DIALOGUE, positions)
    return render(FactualState(DIALOGUE, QUESTION, segments, strategy)).text


def dialogue_tokens(positions: Sequence[int]) -> int:
    """Counted on the rendered page, not from parts."""
    whole = render(FactualState(DIALOGUE, QUESTION, segments_of(DIALOGUE, positions), Strategy(())))
    return Words().count_tokens(whole.text[slice(*whole.dialogue)])


def record_with(factual: FactualState) -> StateRecord:
    return record_of(ReflectiveState(replace(ATTENTIONAL, factual=factual), "s"), "test")


def test_levels_evidence_and_no_context_are_what_the_renderer_gives() -> None:
    assert [shown(level) for level in ("x0", "x1", "x2")] == [RECORD.x0.text, RECORD.x1.text, RECORD.x2.text]
    assert shown("evidence") == rendered([1, 2, 6, 7, 8])
    assert shown("no_context") == rendered([])
    assert not any(words in rendered([]) for words in ("w7 w7", "kite", "the dog"))
    bare = record_with(replace(FACTUAL, strategy=Strategy(())))
    assert shown("evidence", bare) == bare.x0.text
    assert shown("no_context", bare) == rendered([])


def test_oracle_shows_the_gold_evidence_with_the_strategy_or_leaves_out() -> None:
    prompt = prompt_of("oracle")
    assert prompt.text == rendered([7, 13], STRATEGY)
    assert prompt.evidence == ("t7", "t13")
    prompt = prompt_of("oracle", record_with(replace(FACTUAL, question=VISUAL)), VISUAL)
    assert "[Image #1 Caption]" in prompt.text
    assert "[Image #0 Caption]" not in prompt.text
    assert prompt.images == (1,)
    question = replace(QUESTION, evidence=())
    prompt = prompt_of("oracle", record_with(replace(FACTUAL, question=question)), question)
    assert (prompt.left_out, prompt.text) == ("no gold evidence", "")


@pytest.mark.parametrize("keep", ["newest", "oldest"])
@pytest.mark.parametrize("cap", [1, 20, 60, 100, 10_000])
def test_full_context_keeps_the_most_turns_that_fit_and_counts_the_rest(keep: str, cap: int) -> None:
    prompt = prompt_of("full_context", full_tokens=cap, keep=keep)
    kept = 15 - prompt.cut_turns

    def positions(n: int) -> list[int]:
        return list(range(15 - n, 15)) if keep == "newest" else list(range(n))

    assert prompt.text == rendered(positions(kept))
    guided = prompt_of("full_context_strategy", full_tokens=cap, keep=keep)
    assert guided == replace(prompt, text=rendered(positions(kept), STRATEGY))
    assert dialogue_tokens(positions(kept)) <= cap or kept == 1
    assert kept == 15 or dialogue_tokens(positions(kept + 1)) > cap
    assert prompt.evidence == tuple(t for t in ("t7", "t13") if int(t[1:]) in positions(kept))


def test_rag_takes_chunks_by_cosine_up_to_the_cap_of_x0() -> None:
    chunks = Contexts(Words(), ContextConfig(chunk_tokens=20))  # type: ignore[arg-type]
    whole = render(FactualState(DIALOGUE, QUESTION, segments_of(DIALOGUE, range(15)), Strategy(())))
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
    cap = dialogue_tokens([1, 2, 6, 7, 8])
    kept: list[int] = []
    for number in sorted(range(len(by_hand)), key=lambda n: -cosines[n]):
        wider = sorted([*kept, *by_hand[number]])
        if kept and dialogue_tokens(wider) > cap:
            break
        kept = wider
    assert {7, 8} <= set(kept)
    assert chunks.rag(DIALOGUE, QUESTION, [1, 2, 6, 7, 8]) == kept
    assert shown("rag", chunk_tokens=20) == rendered(kept)
    # the strategy of x0 stands where it stands there
    assert shown("rag_strategy", chunk_tokens=20) == rendered(kept, STRATEGY)
    assert len(chunks.rag(DIALOGUE, QUESTION, range(15))) >= len(kept)
    one = Contexts(Words(), ContextConfig(chunk_tokens=20, rag_tokens=1))  # type: ignore[arg-type]
    assert one.rag(DIALOGUE, QUESTION, range(15)) in by_hand


@pytest.mark.parametrize("name", ["no_context", "evidence", "oracle", "rag", "full_context_strategy", "altered"])
def test_no_condition_brings_back_a_hint_that_the_states_do_without(name: str) -> None:
    assert NO_INFORMATION in shown(name)
    assert NO_INFORMATION not in shown(name, record_with(replace(FACTUAL, abstention=False)))


def test_altered_order_summarises_x0_and_marks_afterwards() -> None:
    llm = Told()
    prompt = prompt_of("altered", llm=llm)
    # one block for each of x0's two runs, so that no turn is singled out; the prompt has the markers of x1
    assert llm.asked[0].blocks == ((0, 1), (2, 4))
    assert (llm.asked[0].factual.question.answers, llm.asked[0].factual.question.evidence) == ((), ())
    assert llm.asked[0].factual.question.dimension is None
    assert prompt.text == render(ReflectiveState(ATTENTIONAL, "2 blocks")).text
    # states that went by an inferred kind are summarised by it, too
    inferring = Prompter(None, llm, kind="infer")  # type: ignore[arg-type]
    assert inferring.prompts("altered", Asked([RECORD], DIALOGUE, [QUESTION])) == [prompt]
    assert llm.asked[1].factual.question.dimension == "belief_modeling"
    assert prompt.text != RECORD.x2.text
    assert strategy_of(RECORD.x2) == STRATEGY
    again = attentional_of(RECORD, DIALOGUE, QUESTION)
    assert (again.blocks, again.salience) == (ATTENTIONAL.blocks, ATTENTIONAL.salience)
    assert render(again).text == RECORD.x1.text


LINES = st.text(alphabet="ab;:[] ", min_size=1, max_size=12).map(lambda text: " ".join(text.split())).filter(bool)
KINDS = st.lists(LINES, max_size=3).map(tuple)


@given(st.builds(Strategy, KINDS, KINDS, KINDS, KINDS, KINDS))
def test_any_strategy_comes_back(strategy: Strategy) -> None:
    assert strategy_of(render(replace(FACTUAL, strategy=strategy))) == strategy


def test_other_dialogues_or_prompts_are_refused() -> None:
    changed = Dialogue("d", tuple(replace(s, time="another day") for s in DIALOGUE.sessions))
    with pytest.raises(DataError, match=r"\[q\]: x0 cannot be rebuilt"):
        Prompter(None, Told()).prompts("altered", Asked([RECORD], changed, [QUESTION]))  # type: ignore[arg-type]
    text = "Other rules." + RECORD.x0.text[1:]
    moved = replace(RECORD, x0=replace(RECORD.x0, text=text, dialogue=(RECORD.x0.dialogue[0] + 11, 0)))
    with pytest.raises(DataError, match="other prompt templates"):
        prompt_of("full_context", moved)


def test_an_evaluation_makes_them_from_the_files_the_states_were_built_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remind.models.encoder.SentenceEncoder", lambda *_: Words())
    path, states = tmp_path / "talk.jsonl", tmp_path / "states"
    write_refmem(Corpus((DIALOGUE,), (QUESTION,)), path)
    write_states(states, [RECORD], {"inputs": input_hashes([path]), "llm": "none"})
    names = ["x0", "full_context", "oracle", "rag", "rag_strategy", "altered"]
    cfg = EvaluateConfig(str(states), "m", str(tmp_path / "out"), conditions=names, bootstrap=5)
    cfg.context = ContextConfig(full_tokens=60, chunk_tokens=20)
    words = FixedAnswers("none", Generation("<answer>so</answer>", 0, finished=True))
    with pytest.raises(ConfigError, match="full_context needs the dialogues: set corpus"):
        run_evaluation(cfg, answerer=words)
    cfg.corpus = [str(path)]
    report = run_evaluation(cfg, llm=OfflineLLM(), answerer=words)
    parts = report["conditions"]
    assert {name: part["overall"]["evidence_recall"]["value"] for name, part in parts.items()} == {
        "x0": 0.5,
        "full_context": 0.5,
        "oracle": 1.0,
        "rag": pytest.approx(0.5),
        "rag_strategy": pytest.approx(0.5),
        "altered": 0.5,
    }
    assert parts["full_context"]["counts"]["cut_prompts"] == 1
    assert parts["full_context"]["counts"]["cut_turns"] > 5
    rows = [json.loads((tmp_path / "out" / name / "predictions.jsonl").read_text()) for name in names]
    assert len({row["prompt"] for row in rows}) == 6
    # what decides the turns decides the outputs of both
    contexts = [
        read_json(tmp_path / "out" / name / "run.json")["identity"]["context"] for name in ("rag", "rag_strategy")
    ]
    assert contexts[0] == contexts[1]
    again = run_evaluation(cfg, llm=OfflineLLM(), answerer=words)
    assert [part["resumed"] for part in again["conditions"].values()] == [1] * 6
    path.write_text(path.read_text().replace("w7 w7", "w7  w7"))
    with pytest.raises(DataError, match=r"talk.jsonl has changed since the states were built"):
        run_evaluation(cfg, llm=OfflineLLM(), answerer=words)
    other = path.rename(tmp_path / "other.jsonl")
    with pytest.raises(DataError, match=r"other.jsonl is not an input of the states; name the files"):
        run_evaluation(replace(cfg, corpus=[str(other)]), llm=OfflineLLM(), answerer=words)


def test_names() -> None:
    assert EvaluateConfig("s", "m", "o", conditions=["x1", "layers"]).names == ("x1", "x0", "x2")
    assert EvaluateConfig("s", "m", "o", conditions=["all"]).names == tuple(CONDITIONS)
    assert set(SETS["ladder"]) >= {"evidence", "x0", "x1", "x2", "altered"}
    assert EvaluateConfig("s", "m", "o", level="x1").names == ("x1",)
    assert EvaluateConfig("s", "m", "o", level="x1", conditions=["x2", "x0"]).names == ("x2", "x0")


def test_controls(make_record: Callable[..., StateRecord], write_states: Callable[..., Path]) -> None:
    options = ("red", "There is no information on it", "blue")
    training = [
        make_record("t1", "train", answers=("Paris",)),
        make_record("t2", "train", answers=("Rome", "Roma")),
        make_record("t3", "train", answers=("Rome",)),
        make_record("t4", "train", format="multi", options=options, answers=("C", "A")),
    ]
    asked = [
        make_record("d"),
        make_record("s", format="single", options=options, answers=("B",)),
        make_record("m", format="multi", options=options, answers=("B",)),
        make_record("n", format="single", options=("red", "blue"), answers=("B",)),
    ]
    frequent = most_frequent(training)
    assert frequent == {"direct": "Rome", "multi": "A,C"}

    def replies(name: str) -> list[str | None]:
        prompts = [control(name, record, frequent) for record in asked]
        return [p.left_out or (p.output.text if p.output else "")[8:].split("<")[0] for p in prompts]

    missing = "no training answer of its format"
    assert replies("always_a") == ["no options", "A", "[A]", "A"]
    assert replies("most_frequent") == ["Rome", missing, "[A,C]", missing]
    assert replies("abstain") == ["No information available", "B", "[B]", "[]"]
    found = questions_of(write_states(*training, *asked), "test")
    assert [record.x0.text for one in found for record in one.records] == [record.x0.text for record in asked]


class Newest:
    """The newest turn; sees no gold."""

    def context(self, question: Question, dialogue: Dialogue) -> Context:
        assert (question.answers, question.evidence, question.category) == ((), (), None)
        turn = dialogue.turns[-2]
        return Context(f"{turn.speaker}: {turn.text}", (turn.id,))


def test_a_provider_of_ones_own_stands_beside_the_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remind.models.encoder.SentenceEncoder", lambda *_: Words())
    states, corpus = tmp_path / "states", Corpus((DIALOGUE,), (QUESTION,))
    write_states(states, [RECORD], {"llm": "none"})
    words = FixedAnswers("none", Generation("<answer>so</answer>", 0, finished=True))
    cfg = EvaluateConfig(str(states), "m", str(tmp_path / "out"), conditions=["x0", "newest"], bootstrap=5)
    with pytest.raises(ConfigError, match=r"no condition 'newest'; there are no_context, .*abstain"):
        run_evaluation(cfg, answerer=words)
    report = run_evaluation(cfg, answerer=words, corpus=corpus, providers={"newest": Newest()})
    assert report["conditions"]["newest"]["overall"]["evidence_recall"]["value"] == 0.5
    (prompt,) = Prompter(providers={"newest": Newest()}).prompts("newest", Asked([RECORD], DIALOGUE, [QUESTION]))
    line = f"{DIALOGUE.turns[13].speaker}: {DIALOGUE.turns[13].text}\n"
    x0 = RECORD.x0.text
    assert prompt.text == x0[: RECORD.x0.dialogue[0]] + line + x0[x0.index("\nAsked on: 1 May") :]
    # dialogues alone serve, too
    alone = EvaluateConfig("", "m", str(tmp_path / "alone"), conditions=["no_context", "oracle", "newest"], bootstrap=5)
    report = run_evaluation(alone, answerer=words, data=corpus, providers={"newest": Newest()})
    shown = {name: part["overall"]["evidence_recall"]["value"] for name, part in report["conditions"].items()}
    assert shown == {"no_context": 0.0, "oracle": 1.0, "newest": 0.5}
    with pytest.raises(ConfigError, match="x0 needs states"):
        run_evaluation(replace(alone, conditions=["x0"], out=str(tmp_path / "no")), answerer=words, data=corpus)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "context provider Bad gave NoneType, not a Context with text"),
        (Context("words", ("t99",)), "context provider Bad names turn 't99', which is not in the dialogue"),
    ],
)
def test_what_is_no_context_is_told_in_a_line(given: object, message: str) -> None:
    class Bad:
        def context(self, question: Question, dialogue: Dialogue) -> object:
            return given

    with pytest.raises(DataError, match=rf"\[q\]: {message}"):
        Prompter(providers={"bad": Bad()}).prompts("bad", Asked([RECORD], DIALOGUE, [QUESTION]))
