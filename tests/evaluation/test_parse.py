"""Reading outputs: the asked form and its departures; arbitrary text is a target of tests/fuzz."""

from __future__ import annotations

import time

import pytest

from remind.evaluation.parse import ParsedAnswer, parse_answer

OPTIONS = ("red", "green", "blue", "Dark  Grey")


def letters(answer: str, format: str = "multi") -> str:
    parsed = parse_answer(f"<answer>{answer}</answer><explanation>x</explanation>", format, OPTIONS)
    return "".join(sorted(parsed.letters))


def test_the_asked_form_has_no_problems() -> None:
    parsed = parse_answer("<answer>[A,D]</answer><explanation>Ana: hi\nBo: yes</explanation>", "multi", OPTIONS)
    assert parsed == ParsedAnswer("[A,D]", frozenset("AD"), ("Ana: hi", "Bo: yes"), frozenset(), ())
    parsed = parse_answer("<answer>B</answer><explanation>[0, 12]</explanation>", "single", OPTIONS, visual=True)
    assert parsed == ParsedAnswer("B", frozenset("B"), (), frozenset({0, 12}), ())
    parsed = parse_answer("<answer>a trip</answer><explanation>Ana: hi</explanation>")
    assert parsed == ParsedAnswer("a trip", frozenset(), ("Ana: hi",), frozenset(), ())


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("[A,D]", "AD"),
        ("A", "A"),
        ("A and D", "AD"),
        ("(B)", "B"),
        ("[A], [B]", "AB"),
        ("A. B.", "AB"),
        ("B. green", "B"),
        ("GREEN", "B"),
        ("dark grey", "D"),
        ("A, Z", "A"),
        ("[E, F]", ""),
        ("", ""),
        ("none of them", ""),
    ],
)
def test_letters(answer: str, expected: str) -> None:
    assert letters(answer) == expected


def test_problems_of_letters_are_named() -> None:
    two = parse_answer("<answer>a, b</answer><explanation></explanation>", "single", OPTIONS)
    assert two.problems == ("lower-case letters", "several letters for one option")


@pytest.mark.parametrize(
    ("output", "answer", "evidence", "problems"),
    [
        ("trip", "trip", (), ("no answer tag", "no explanation tag")),
        ("trip <explanation>Ana: hi</explanation>", "trip", ("Ana: hi",), ("no answer tag",)),
        ("<answer>trip", "trip", (), ("answer tag not closed", "no explanation tag")),
        ("<answer>one</answer><answer>two</answer>", "one", (), ("several answer tags", "no explanation tag")),
        ("<answer>no <answer>yes</answer>", "yes", (), ("no explanation tag",)),
        ("<ANSWER>x</ Answer ><explanation>y", "x", ("y",), ("explanation tag not closed",)),
        ("<answer></answer>", "", (), ("empty answer", "no explanation tag")),
        ("", "", (), ("no answer tag", "empty answer", "no explanation tag")),
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
        ("Image 2", {2}, "images not a JSON list"),
        ('[1, -2, true, 1.5, "4", null]', {1}, "image entries that are no index"),
        ('{"images": [7]}', {7}, "images not a JSON list"),
        ("9" * 5000, set(), "images not a JSON list"),
        ("[" * 100_000, set(), "images not a JSON list"),
        ("", set(), None),
    ],
)
def test_images(explanation: str, expected: set[int], problem: str | None) -> None:
    parsed = parse_answer(f"<answer>A</answer><explanation>{explanation}</explanation>", "single", OPTIONS, True)
    assert parsed.images == expected
    assert parsed.problems == (() if problem is None else (problem,))


@pytest.mark.parametrize(
    ("answer", "options", "letter"),
    [
        ("red", ("Red", "red"), "B"),
        ("Red", ("Red", "red"), "A"),
        ("straße", ("strasse", "straße"), "B"),
        ("RED", ("Red", "red"), None),
        ("STRASSE", ("strasse", "straße"), None),
    ],
)
def test_words_name_an_option_where_no_other_has_them(
    answer: str, options: tuple[str, ...], letter: str | None
) -> None:
    parsed = parse_answer(f"<answer>{answer}</answer><explanation>x</explanation>", "single", options)
    assert parsed.letters == (frozenset() if letter is None else {letter})
    assert parsed.readable == (letter is not None)
    several, one = ("words of several options", "no option letter"), ("words of an option for its letter",)
    assert parsed.problems == (several if letter is None else one)


@pytest.mark.parametrize("piece", ["<answer>", "<", "< ", " ", "<answer></answer>", "A,", "[", "1 ", "<answer> <"])
def test_long_hostile_outputs_take_linear_time(piece: str) -> None:
    output = piece * 20_000
    start = time.process_time()
    parse_answer(output, "multi", OPTIONS, True)
    parse_answer(f"<answer>A</answer><explanation>{output}", "multi", OPTIONS, True)
    assert time.process_time() - start < 5
