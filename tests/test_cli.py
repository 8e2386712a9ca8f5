"""The shared command line: help for every field, overrides, config files, one-line errors."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from remind.cli import main
from remind.errors import ConfigError


@dataclass
class Inner:
    """Inner settings."""

    lr: float = 1e-5
    """Step size."""


@dataclass
class Outer:
    """Outer settings."""

    input: str | list[str]
    """What to read."""
    inner: Inner = field(default_factory=Inner)
    """Nested."""
    size: int = 3
    """How many."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError("size must be at least 1")


def run(argv: list[str]) -> Outer:
    seen: list[Outer] = []
    main(Outer, seen.append, "A test.", argv)
    return seen[0]


def test_config_file_and_dotted_overrides(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("input: a\ninner:\n  lr: 0.5\nsize: 7\n")
    cfg = run(["--config", str(file), "--inner.lr", "2e-5"])
    assert (cfg.input, cfg.inner.lr, cfg.size) == ("a", 2e-5, 7)
    assert run(["--input", "[x,y]"]).input == ["x", "y"]


def test_help_explains_each_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run(["--help"])
    assert stop.value.code == 0
    page = capsys.readouterr().out
    assert all(text in page for text in ("What to read.", "Step size.", "How many.", "--print_config", "--inner.lr"))


def test_print_config(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run(["--input", "a", "--print_config"])
    assert stop.value.code == 0
    assert "lr: 1.0e-05" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--input", "a", "--colour", "3"], "colour"),
        (["--input", "a", "--inner.colour", "3"], "colour"),
        ([], "input"),
        (["--input", "a", "--inner.lr", "fast"], "inner.lr"),
        (["--input", "a", "--config", "/none.yaml"], "none.yaml"),
        (["--input", "a", "--size", "0"], "size must be at least 1"),
    ],
)
def test_mistakes_are_one_line_and_status_2(argv: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run(argv)
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert word in message


def test_unknown_key_in_a_config_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("input: a\ninner:\n  lrr: 0.5\n")
    with pytest.raises(SystemExit) as stop:
        run(["--config", str(file)])
    assert stop.value.code == 2
    assert "lrr" in capsys.readouterr().err


def test_our_errors_and_missing_files_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: Outer) -> None:
        raise ConfigError("two\nlines")

    def vanish(_: Outer) -> None:
        Path("/no/such/file").read_text()

    for function, text in ((fail, "error: two lines\n"), (vanish, "error: /no/such/file: No such file or directory\n")):
        with pytest.raises(SystemExit) as stop:
            main(Outer, function, "A test.", ["--input", "a"])
        assert stop.value.code == 2
        assert capsys.readouterr().err == text
