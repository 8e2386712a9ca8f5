"""The shared command line: help for every field, overrides, config files, one-line errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from remind.core.cli import main
from remind.core.errors import ConfigError
from sae.ranges import PositiveInt


@dataclass
class Inner:
    """Inner settings."""

    lr: float = 1e-5
    """Step size."""


@dataclass
class Extra:
    """Optional settings."""

    rank: PositiveInt
    """How many."""
    note: str = ""
    """Words."""


@dataclass
class Pair:
    """Two numbers."""

    a: int
    """One."""
    b: int
    """The other."""


@dataclass
class Outer:
    """Outer settings."""

    input: str | list[str]
    """What to read."""
    inner: Inner = field(default_factory=Inner)
    """Nested."""
    pairs: tuple[Pair | tuple[float, ...], ...] = (Pair(0, 1),)
    """Several."""
    size: int = 3
    """How many."""
    extra: Extra | None = None
    """Optional."""
    limit: PositiveInt | None = 9
    """A number or nothing."""
    words: list[str] | None = None
    """Some."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError("size must be at least 1")


def run(argv: list[str]) -> Outer:
    seen: list[Outer] = []
    main(Outer, seen.append, "A test.", argv, repeatable=("words",))
    return seen[0]


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a refused command line."""
    with pytest.raises(SystemExit) as stop:
        run(argv)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert len(error) < 600
    return error


def test_config_file_and_dotted_overrides(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("input: a\ninner:\n  lr: 0.5\nsize: 7\nlimit: null\n")
    cfg = run(["--config", str(file), "--inner.lr", "2e-5"])
    assert (cfg.input, cfg.inner.lr, cfg.size, cfg.limit) == ("a", 2e-5, 7, None)
    assert run(["--input", "[x,y]"]).input == ["x", "y"]
    assert run(["--input", "a", "--pairs", "[[0,2],{a: 1, b: 2}]"]).pairs == ((0, 2), Pair(1, 2))
    file.write_text("input: a\nwords: [one]\n")
    assert run(["--config", str(file), "--words", "a: b?", "--words=[c] d?"]).words == ["one", "a: b?", "[c] d?"]


def test_help_and_print_config(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, texts in (
        (["--help"], ("--input INPUT [--config FILE] [--FIELD VALUE ...]\n", "What to read.", "--inner.lr")),
        (["--input", "a", "--print_config"], ("lr: 1.0e-05", "  b: 1\n")),
    ):
        with pytest.raises(SystemExit) as stop:
            run(argv)
        page = capsys.readouterr().out
        assert stop.value.code == 0
        assert all(text in page for text in texts)


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--input", "a", "--sizes", "3"], "sizes: no such option; did you mean size?"),
        ([], "required: input"),
        (["--input", "a", "--inner.lr", "fast"], "error: inner.lr: Expected a <class 'float'>. Got value: fast"),
        (["--input", "a", "--limit", "0"], "error: limit: Input should be greater than or equal to 1, not 0"),
    ],
)
def test_mistakes_on_the_command_line(argv: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert word in refused(argv, capsys)


#: Content of a config file, the line that is named, and words of the error.
MISTAKES = {
    "unknown": (b"input: a\nbogus_key: 3\n", 2, "bogus_key: no such option"),
    "range": (b"input: a\nextra:\n  note: a\n  rank: 0\n", 4, "extra.rank: Input should be greater than"),
    "broken": (b"input: a\ninner: {lr: 3\nsize: 3\n", 3, "not YAML"),
    "twice": (b"size: 3\ninput: a\nsize: 4\n", 3, "size: the key occurs twice"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_a_config_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, line, words = MISTAKES[name]
    file = tmp_path / "c.yaml"
    file.write_bytes(content)
    error = refused(["--config", str(file), "--input", "b"], capsys)
    assert words in error
    assert error.startswith(f"error: {file}:{line}: ")


def test_our_errors_and_missing_files_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: Outer) -> None:
        raise ConfigError("two\nlines")

    def read_missing(_: Outer) -> None:
        Path("/no/such/file").read_text()

    cases = ((fail, "error: two lines\n"), (read_missing, "error: /no/such/file: No such file or directory\n"))
    for function, text in cases:
        with pytest.raises(SystemExit) as stop:
            main(Outer, function, "A test.", ["--input", "a"])
        assert stop.value.code == 2
        assert capsys.readouterr().err == text
