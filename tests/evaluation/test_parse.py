"""Reading outputs: the asked form and its departures; arbitrary text is a target of tests/fuzz."""

from __future__ import annotations

import pytest

from remind.evaluation.parse import ParsedAnswer, parse_answer

OPTIONS = ("red", "green", "blue", "Dark  Grey")


def test_the_asked_form_has_no_problems() -> None:
    parsed = parse_answer("<answer>[A,D]</answer><explanation>Ana: hi\nBo: yes</explanation>", "multi", OPTIONS)
    assert parsed == ParsedAnswer("[A,D]", frozenset("AD"), ("Ana: hi", "Bo: yes"), frozenset(), ())
    parsed = parse_answer("<answer>B</answer><explanation>[0, 12]</explanation>", "single", OPTIONS, visual=True)
    assert parsed == ParsedAnswer("B", frozenset("B"), (), frozenset({0, 12}), ())


NAMED, NONE = ("words of an option for its letter",), ("no option letter",)


@pytest.mark.parametrize(
    ("answer", "options", "letters", "problems"),
    [
        ("A and D", OPTIONS, "AD", ()),
        ("a, b", OPTIONS, "AB", ("lower-case letters",)),
        ("B. green", OPTIONS, "B", ("words beside the letter",)),
        ("dark grey", OPTIONS, "D", NAMED),
        ("A, Z", OPTIONS, "A", ("letters that name no option",)),
        ("", OPTIONS, "", ("empty answer", *NONE)),
        # words name an option where no other has them
        ("red", ("Red", "red"), "B", NAMED),
    ],
)
def test_letters(answer: str, options: tuple[str, ...], letters: str, problems: tuple[str, ...]) -> None:
    parsed = parse_answer(f"<answer>{answer}</answer><explanation>x</explanation>", "multi", options)
    assert ("".join(sorted(parsed.letters)), parsed.problems) == (letters, problems)
    assert parsed.readable == (not set(NONE) & set(problems))


@pytest.mark.parametrize(
    ("output", "answer", "evidence", "problems"),
    [
        ("trip <explanation>Ana: hi</explanation>", "trip", ("Ana: hi",), ("no answer tag",)),
        ("<answer>trip", "trip", (), ("answer tag not closed", "no explanation tag")),
        ("<answer>one</answer><answer>two</answer>", "one", (), ("several answer tags", "no explanation tag")),
        ("<answer>no <answer>yes</answer>", "yes", (), ("no explanation tag",)),
        ("", "", (), ("no answer tag", "empty answer", "no explanation tag")),
        # a thought is no answer, whoever opened it, and one that never ends leaves none
        ("<think><answer>a</answer></think><answer>b</answer>", "b", (), ("no explanation tag",)),
        ("<answer>a</answer></think>\n<answer>b</answer>", "b", (), ("no explanation tag",)),
        ("<think><answer>a</answer>", "", (), ("no answer tag", "empty answer", "no explanation tag")),
        ("<answer>a\n b</answer><explanation>\n- x\n\n* y \n</explanation>", "a b", ("x", "y"), ()),
    ],
)
def test_tags(output: str, answer: str, evidence: tuple[str, ...], problems: tuple[str, ...]) -> None:
    parsed = parse_answer(output)
    assert (parsed.answer, parsed.evidence, parsed.problems) == (answer, evidence, problems)


@pytest.mark.parametrize(
    ("explanation", "expected", "problem"),
    [
        ("[3, 3, 1]", {1, 3}, None),
        ("3 and #5.", {3, 5}, "images not a JSON list"),
        ("[1, -2, true, 1.5, null]", {1}, "images not a JSON list"),
        ("[" * 100_000, set(), "images not a JSON list"),
    ],
)
def test_images(explanation: str, expected: set[int], problem: str | None) -> None:
    parsed = parse_answer(f"<answer>A</answer><explanation>{explanation}</explanation>", "single", OPTIONS, True)
    assert (parsed.images, parsed.problems) == (expected, () if problem is None else (problem,))
