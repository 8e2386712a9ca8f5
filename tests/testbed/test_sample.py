"""The bundled benchmark: well formed, balanced, and answerable from the turns and captions it names."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from itertools import combinations

import pytest

from remind.data import sample
from remind.data.dialogue import DIMENSIONS, FORMATS, VISUAL_DIMENSIONS
from remind.data.readers import read

LETTERS = "ABCD"


@pytest.fixture(scope="module")
def contexts() -> dict[str, dict]:
    return {r["id"]: r for r in rows() if r["type"] == "context"}


@pytest.fixture(scope="module")
def questions() -> list[dict]:
    return [r for r in rows() if r["type"] == "question"]


def rows() -> list[dict]:
    return [
        json.loads(line)
        for path in sorted(sample.sample_path().glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def turns(context: dict) -> dict[str, dict]:
    return {turn["id"]: turn for session in context["sessions"] for turn in session["turns"]}


def pictures(context: dict) -> list[tuple[str, str]]:
    """(speaker, caption) of every image, in order of index."""
    return [(t["speaker"], image["caption"]) for t in turns(context).values() for image in t["images"]]


def chosen(question: dict) -> list[str]:
    return [question["options"][LETTERS.index(letter)] for letter in question["answers"]]


# the files


def test_size_and_order(contexts, questions):
    assert len(contexts) == 12
    assert all(len(c["sessions"]) == 6 for c in contexts.values())
    per_session = [len(s["turns"]) for c in contexts.values() for s in c["sessions"]]
    assert 9 <= sum(per_session) / len(per_session) <= 14
    assert {len({t["speaker"] for t in turns(c).values()}) for c in contexts.values()} == {2, 3}
    assert set(Counter(q["context_id"] for q in questions).values()) == {16}
    for context in contexts.values():
        times = [session["time"] for session in context["sessions"]]
        assert times == sorted(set(times))


def test_the_reader_takes_it_without_a_dangling_reference(questions):
    corpus = read(sample.sample_path())
    assert len(corpus.dialogues) == 12
    assert len(corpus.questions) == len(questions)
    assert not corpus.dangling
    assert {question.split for question in corpus.questions} == {"train", "dev", "test"}


def test_small_talk_shares_neither_line_nor_speaker_with_the_benchmark(contexts):
    corpus = read(sample.corpus_path())
    assert not corpus.questions
    assert len(corpus.dialogues) == 48
    talk = [turn for dialogue in corpus.dialogues for turn in dialogue.turns]
    ours = [turn for context in contexts.values() for turn in turns(context).values()]
    assert not {turn.text for turn in talk} & {turn["text"] for turn in ours}
    assert not {turn.speaker for turn in talk} & {turn["speaker"] for turn in ours}
    assert not [turn.text for turn in talk if re.search("[<{]", turn.text)]
    assert not re.search(r"\{(S|topic|subject)\}", json.dumps(rows()))


# the questions


def test_every_evidence_id_and_image_exists(contexts, questions):
    for question in questions:
        context = contexts[question["context_id"]]
        assert question["evidence"]
        assert set(question["evidence"]) <= set(turns(context)), question["id"]
        assert len(set(question["evidence"])) == len(question["evidence"])
        assert all(0 <= image < len(pictures(context)) for image in question["images"])
        assert bool(question["images"]) == (question["dimension"] in VISUAL_DIMENSIONS)


def test_images_of_a_question_are_those_of_its_evidence_turns(contexts, questions):
    for question in questions:
        place = 0
        expected = []
        for turn in turns(contexts[question["context_id"]]).values():
            for _ in turn["images"]:
                if turn["id"] in question["evidence"]:
                    expected.append(place)
                place += 1
        if question["dimension"] in VISUAL_DIMENSIONS:
            assert question["images"] == expected, question["id"]


def test_evidence_is_scattered_over_sessions(questions):
    for question in questions:
        if question["dimension"] != "cross_modal_latent_inference":
            assert len({turn_id.split(":")[0] for turn_id in question["evidence"]}) >= 3, question["id"]


def test_splits_share_no_dialogue(questions):
    owners = defaultdict(set)
    for question in questions:
        owners[question["split"]].add(question["context_id"])
    assert {name: len(ids) for name, ids in owners.items()} == {"train": 7, "dev": 2, "test": 3}
    for one, two in combinations(owners.values(), 2):
        assert not one & two


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_dimension_comes_in_every_format(questions, split):
    there = {(q["dimension"], q["format"]) for q in questions if q["split"] == split}
    assert there == {(dimension, kind) for dimension in DIMENSIONS for kind in FORMATS}


def test_options_and_answers_fit_the_format(questions):
    for question in questions:
        if question["format"] == "direct":
            assert question["options"] == []
            assert len(question["answers"]) >= 2
            assert all(1 <= len(answer.split()) <= 4 for answer in question["answers"]), question["answers"]
            continue
        assert len(set(question["options"])) == 4, question["options"]
        assert question["answers"] == sorted(set(question["answers"]))
        assert set(question["answers"]) <= set(LETTERS)
        assert len(question["answers"]) == 1 or question["format"] == "multi"


def test_letters_are_balanced(questions):
    for split in ("train", "test"):
        letters = Counter(q["answers"][0] for q in questions if q["format"] == "single" and q["split"] == split)
        assert max(letters.values()) - min(letters[letter] for letter in LETTERS) <= 1
    multi = [q for q in questions if q["format"] == "multi"]
    assert set(Counter(len(q["answers"]) for q in multi)) == {1, 2, 3, 4}
    marked = Counter(letter for q in multi for letter in q["answers"])
    assert min(marked[letter] for letter in LETTERS) > 0.7 * max(marked.values())


def test_the_right_option_is_not_given_away_by_its_length(questions):
    single = [q for q in questions if q["format"] == "single"]
    longest = sum(max(q["options"], key=len) == chosen(q)[0] for q in single)
    assert longest < 0.5 * len(single)


def test_evidence_turns_belong_to_the_speaker_asked_about(contexts, questions):
    for question in questions:
        context = contexts[question["context_id"]]
        speakers = {turn["speaker"] for turn in turns(context).values()}
        asked = [name for name in speakers if re.search(rf"\b{name}\b", question["question"])]
        assert len(asked) == 1, question["question"]
        said = {turns(context)[turn_id]["speaker"] for turn_id in question["evidence"]}
        if question["dimension"] == "implicit_boundary_modeling":
            assert asked[0] in said
        else:
            assert said == set(asked), question["id"]


# answers, worked out anew from turns and captions alone


def spoken_to(question: dict, context: dict) -> str:
    return next(
        t["speaker"] for t in turns(context).values() if re.search(rf"\b{t['speaker']}\b", question["question"])
    )


def pick(questions: list[dict], dimension: str, kind: str) -> list[dict]:
    found = [q for q in questions if q["dimension"] == dimension and q["format"] == kind]
    assert len(found) >= 7
    return found


STYLE_WORDS = (
    "straight above", "black and white", "rainy window", "two boots", "round mirror", "first light of dawn",
    "photographer's shadow", "tilted to the left", "close-up", "pencil", "open door",
)  # fmt: skip


def common_style(context: dict, speaker: str) -> str:
    captions = [caption for who, caption in pictures(context) if who == speaker]
    assert len(captions) >= 4
    shared = [word for word in STYLE_WORDS if all(word in caption for caption in captions)]
    assert len(shared) == 1
    return shared[0]


def test_visual_style_follows_from_all_captions_of_the_speaker(contexts, questions):
    for question in pick(questions, "personalized_visual_baselines", "single"):
        context = contexts[question["context_id"]]
        word = common_style(context, spoken_to(question, context))
        assert [word in option.lower() for option in question["options"]].count(True) == 1
        assert word in chosen(question)[0].lower()
    for question in pick(questions, "personalized_visual_baselines", "multi"):
        context = contexts[question["context_id"]]
        word = common_style(context, spoken_to(question, context))
        assert [option for option in question["options"] if word in option] == chosen(question)


def test_motif_follows_from_the_captions_of_the_topic(contexts, questions):
    for question in pick(questions, "topic_scoped_visual_prototypes", "multi"):
        context = contexts[question["context_id"]]
        captions = [pictures(context)[index][1].rsplit(", ", 1)[0] for index in question["images"]]
        assert len(captions) == 3
        words = [set(caption.split()) for caption in captions]
        shared = set.intersection(*words)
        best = max(len(shared & set(option.split())) for option in question["options"])
        fitting = [option for option in question["options"] if len(shared & set(option.split())) == best]
        assert fitting == chosen(question), question["id"]
    for question in pick(questions, "topic_scoped_visual_prototypes", "direct"):
        context = contexts[question["context_id"]]
        noun = question["answers"][0].split()[-1].rstrip("s")
        for index in question["images"]:
            caption = pictures(context)[index][1]
            assert noun in caption or any(form.split()[-1] in caption for form in question["answers"]), caption


TOPICS = (
    "pottery", "the choir", "sourdough baking", "the chess club", "the swim team", "the Italian class",
    "the allotment", "early yoga", "the cello", "bouldering", "the book club", "salsa dancing", "birdwatching",
    "the night school",
)  # fmt: skip
STANCE = {
    "keen": r"can't get enough|best decision|came home beaming|happy as can be",
    "doubt": r"drag myself|not sure|didn't miss it|feels like a duty",
    "quit": r"i'm done with|dropped|signed off|i'm out",
    "averse": r"not my thing|won't catch me|stare at a wall|said no to",
    "curious": r"gave .* a go|misjudged|might go once more|still thinking",
    "back": r"picked up .* again|is back at|restarted|let me return",
}
COURSES = {
    ("keen", "doubt", "quit"): ("doubtful, and gave it up", {"quit", "stopped"}),
    ("averse", "curious", "keen"): ("came to love it", {"loves it"}),
    ("keen", "quit", "back"): ("took it up again gladly", {"back at it"}),
    ("averse", "curious", "doubt"): ("cooled off again", {"losing interest"}),
    ("curious", "keen", "quit"): ("then dropped it", {"quit", "dropped it"}),
}


def stances(question: dict, context: dict) -> tuple[str, ...]:
    """The speaker's stances to the topic asked about, from every turn in which the speaker names it."""
    speaker = spoken_to(question, context)
    topic = next(t for t in TOPICS if t in question["question"])
    said = [t for t in turns(context).values() if t["speaker"] == speaker and topic.lower() in t["text"].lower()]
    assert [turn["id"] for turn in said] == question["evidence"]
    found = []
    for turn in said:
        kinds = [kind for kind, pattern in STANCE.items() if re.search(pattern, turn["text"].lower())]
        assert len(kinds) == 1, turn["text"]
        found += kinds
    return tuple(found)


def test_changing_stance_follows_from_what_the_speaker_says_of_the_topic(contexts, questions):
    for question in pick(questions, "temporal_dynamics", "single"):
        words, _ = COURSES[stances(question, contexts[question["context_id"]])]
        assert words in chosen(question)[0]
        assert sum(words in option for option in question["options"]) == 1
    for question in pick(questions, "temporal_dynamics", "direct"):
        _, forms = COURSES[stances(question, contexts[question["context_id"]])]
        assert forms <= set(question["answers"])


def test_statements_about_a_changing_stance_are_true_or_false_as_marked(contexts, questions):
    truth = {
        r"At first .* was keen": lambda s: s[0] == "keen",
        r"At first .* wanted nothing": lambda s: s[0] == "averse",
        r"had given up": lambda s: s[-1] == "quit",
        r"In the end .* was happy": lambda s: s[-1] in {"keen", "back"},
        r"later returned": lambda s: s[-2:] == ("quit", "back"),
        r"at some point": lambda s: "keen" in s,
        r"tried .* after refusing": lambda s: s[:2] == ("averse", "curious"),
        r"never changed": lambda s: len(set(s)) == 1,
        r"lost interest .* before giving": lambda s: "doubt" in s and s.index("doubt") < s.index("quit"),
        r"turned more than once": lambda s: len(set(s)) == 3,
    }
    for question in pick(questions, "temporal_dynamics", "multi"):
        course = stances(question, contexts[question["context_id"]])
        for letter, option in zip(LETTERS, question["options"], strict=True):
            rules = [rule for pattern, rule in truth.items() if re.search(pattern, option)]
            assert len(rules) == 1, option
            assert rules[0](course) == (letter in question["answers"]), (course, option)


SUBJECTS = {
    "The father": r"father|\bdad\b",
    "Money": r"set you back|raise|pay at",
    "The old job": r"old firm|the lab|former boss",
    "Health": r"doctor|tablets|pale",
    "Love life": r"seeing anyone|that date|bring someone",
    "The novel": r"novel|read a page|publisher",
    "Driving": r"the car|behind the wheel|hatchback",
    "The brother": r"brother",
    "The home town": r"grew up|your village|home town",
    "The degree": r"the degree|thesis|that exam",
}


def test_avoided_subject_is_the_one_never_answered(contexts, questions):
    for question in pick(questions, "implicit_boundary_modeling", "single"):
        context = contexts[question["context_id"]]
        speaker = spoken_to(question, context)
        asked, answered = Counter(), Counter()
        for session in context["sessions"]:
            for first, second in zip(session["turns"], session["turns"][1:], strict=False):
                for subject, pattern in SUBJECTS.items():
                    if (
                        second["speaker"] == speaker
                        and "?" in first["text"]
                        and re.search(pattern, first["text"].lower())
                    ):
                        asked[subject] += 1
                        answered[subject] += bool(re.search(pattern, second["text"].lower())) or (
                            subject in ("Health", "Love life", "Driving", "Money")
                            and bool(re.search(r"doctor|seeing|drive|raise", second["text"].lower()))
                        )
        avoided = [subject for subject, count in asked.items() if count >= 3 and not answered[subject]]
        assert avoided == chosen(question), (asked, answered)
