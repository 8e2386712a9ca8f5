"""The shared command line: help for every field, overrides, config files, one-line errors."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from remind.core.cli import main, named
from remind.core.errors import ConfigError


@dataclass
class Inner:
    """Inner settings."""

    lr: float = 1e-5
    """Step size."""


@dataclass
class Extra:
    """Optional settings."""

    rank: int
    """How many."""
    note: str = ""
    """Words."""


@dataclass
class Outer:
    """Outer settings."""

    input: str | list[str]
    """What to read."""
    inner: Inner = field(default_factory=Inner)
    """Nested."""
    size: int = 3
    """How many."""
    extra: Extra | None = None
    """Optional."""

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


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a refused command line says."""
    with pytest.raises(SystemExit) as stop:
        run(argv)
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert len(said) < 600
    return said


#: Content of a config file, the line that is named (None: none), and words of the error.
MISTAKES = {
    "unknown": (b"input: a\nbogus_key: 3\n", 2, "bogus_key"),
    "unknown in a group": (b"input: a\ninner:\n  lr: .5\n  lrr: 0.5\n", 4, "lrr"),
    "unknown in an optional group": (b"input: a\nextra:\n  rank: 3\n  rankk: 3\n", 4, "rankk"),
    "dotted": (b"inner.lrr: 3\n", 1, "lrr"),
    "type": (b"input: a\nsize: large\n", 2, "size"),
    "group": (b"input: a\ninner: 3\n", 2, "inner is a group"),
    "group is a list": (b"inner: [3]\n", 1, "inner is a group"),
    "own key": (b"input: a\nconfig: other.yaml\n", 2, "config"),
    "meta key": (b"__path__: a\n", 1, "__path__"),
    "broken": (b"input: a\ninner: {lr: 3\nsize: 3\n", 3, "not YAML"),
    "list": (b"- a\n- b\n", 1, "a mapping of fields"),
    "text": (b"only words\n", 1, "a mapping of fields"),
    "nothing": (b"# only a comment\n", None, "a mapping of fields"),
    "two documents": (b"size: 3\n---\nsize: 4\n", 2, "another document"),
    "not UTF-8": (b"size: 3\ninput: caf\xe9\n", 2, "not UTF-8 (byte 18)"),
    "UTF-16": ("size: 3\n".encode("utf-16"), 1, "not UTF-8 (byte 0)"),
    "NUL": (b"size: 3\ninput: a\0b\n", 2, "control characters"),
    "twice": (b"size: 3\ninput: a\nsize: 4\n", 3, "'size' stands twice"),
    "twice in a group": (b"inner: {lr: 1, lr: 2}\n", 1, "'inner.lr' stands twice"),
    "twice, once dotted": (b"inner.lr: 1\ninner: {lr: 2}\n", 2, "'inner.lr' stands twice"),
    "list as key": (b"? [a, b]\n: 3\n", 1, "cannot be a key"),
    "number as key": (b"3: 3\n", None, "must be a string"),
    "object": (b"input: !!python/object/apply:os.getcwd []\n", 1, "no plain value"),
    "wrong tag": (b"size: !!int large\n", None, "large"),
    "alias of nothing": (b"input: *a\n", 1, "alias"),
    "alias of itself": (b"inner: &a {lr: *a}\n", 1, "holds itself"),
    "deep": (b"input: " + b"[" * 9000 + b"]" * 9000, 1, "nested too deeply"),
    "bomb": (
        b"a0: &a0 [x]\n" + b"".join(b"a%d: &a%d [%s]\n" % (n, n, b"*a%d," % (n - 1) * 9) for n in range(1, 12)),
        6,
        "aliases",
    ),
    "large": (b"input: a\n#" + b" " * (1 << 20), None, "1,048,586 bytes"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_config_file_is_told_with_file_and_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, line, words = MISTAKES[name]
    file = tmp_path / "c.yaml"
    file.write_bytes(content)
    said = refused(["--config", str(file), "--input", "b"], capsys)
    assert said.startswith(f"error: {file}: " if line is None else f"error: {file} [line {line}]: ")
    assert words in said


def test_what_is_no_config_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, words in (
        (tmp_path, "is a folder, a file was expected"),
        (tmp_path / "none.yaml", "no such file"),
        (tmp_path / "pipe", "is not a regular file"),
        (Path("/dev/zero"), "is not a regular file"),
        (tmp_path / ("x" * 300), "cannot be read: File name too long"),
    ):
        assert f"{path}: {words}" in refused(["--config", str(path), "--input", "b"], capsys)
    # of 100 MB not a byte is read
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(100_000_000)
    assert "large.yaml: has 100,000,000 bytes" in refused(["--config", str(tmp_path / "large.yaml")], capsys)


def test_a_value_out_of_range_is_told_with_the_files_it_may_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("size: 0\n")
    said = refused(["--config", str(file), "--input", "a"], capsys)
    assert said == f"error: size must be at least 1 (with --config {file})\n"
    assert f"input (with --config {file})" in refused(["--config", str(file)], capsys)


def test_a_mistake_on_the_command_line_is_not_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("input: a\ninner: {lr: 0.5}\n")
    for more in (["--inner.lr", "fast"], ["--inner.lrr", "3"]):
        assert file.name not in refused(["--config", str(file), *more], capsys)


def test_the_second_of_two_config_files_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in (("a", "input: a\nsize: 4\n"), ("b", "size: 5\ncolour: 3\n")):
        (tmp_path / name).write_text(content)
    argv = [word for name in ("a", "b") for word in ("--config", str(tmp_path / name))]
    assert f"{tmp_path / 'b'} [line 2]: " in refused(argv, capsys)
    (tmp_path / "b").write_text("size: 5\n")
    assert (run(argv).input, run(argv).size) == ("a", 5)


def test_a_group_may_have_a_file_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, group = tmp_path / "c.yaml", tmp_path / "inner.yaml"
    file.write_text("input: a\ninner: inner.yaml\n")
    group.write_text("lr: 0.5\n")
    ways = (["--config", str(file)], ["--input", "a", "--inner", str(group)], ["--input", "a", f"--inner={group}"])
    assert [run(way).inner.lr for way in ways] == [0.5] * 3
    for content, line in ((b"lr: 0.5\nlrr: 3\n", 2), (b"lr: caf\xe9\n", 1), (b"lr: 1\nlr: 2\n", 2)):
        group.write_bytes(content)
        for way in ways:
            assert refused(way, capsys).startswith(f"error: {group} [line {line}]: ")


def test_the_command_line_may_complete_what_a_file_begins(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("base: &b {note: x}\n".replace("base: &b {note: x}\n", "") + "input: a\nextra: {note: x}\n")
    extra = run(["--config", str(file), "--extra.rank", "3"]).extra
    assert extra is not None
    assert (extra.rank, extra.note) == (3, "x")
    # aliases and a byte order mark are no mistakes
    file.write_bytes("\ufeffinput: &name 2024-01-01\nextra: {rank: 3, note: *name}\n".encode())
    extra = run(["--config", str(file)]).extra
    assert extra is not None
    assert extra.note == "2024-01-01"


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


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["A", "B", "--seed", "1"], ["--first", "A", "--second", "B", "--seed", "1"]),
        (["--first", "A", "--second", "B"], ["--first", "A", "--second", "B"]),
        (["A", "--second", "B"], ["--first", "A", "--second", "B"]),
        (["--help"], ["--help"]),
        ([], []),
    ],
)
def test_plain_arguments(given: list[str], wanted: list[str]) -> None:
    assert named(given, ("first", "second")) == wanted
