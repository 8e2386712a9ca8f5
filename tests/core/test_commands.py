"""The command line: the table of commands, help, overrides, config files, one-line errors, how little is imported."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from pkgutil import resolve_name

import pytest
import yaml

from remind import commands
from remind.commands import COMMANDS
from remind.core.cli import main, parse
from remind.core.errors import ConfigError
from remind.core.run_folder import as_dict, flatten
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


ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
#: Libraries that take long to import; none may be needed for help or for a mistake on the command line.
HEAVY = ("torch", "transformers", "pyarrow", "sklearn", "scipy", "sentence_transformers", "matplotlib", "sae_lens")
#: The command, or the config class of an experiment, that takes a kind of shipped config no command is named after.
#: Some are a part of a config, given after one that names the rest.
KINDS = {
    **dict.fromkeys(("baselines", "memory"), "run-memory"),
    **dict.fromkeys(("build", "grounding"), "build-states"),
    **dict.fromkeys(("adrpo", "membuilder", "salimory"), "train-memory"),
    "objective": "train-pra",
    "sft": "train-pra",
    "chain": "experiments.chain.config:ChainConfig",
    "inference": "experiments.cost.curve:InferenceCostConfig",
    "policies": "experiments.policies:PoliciesConfig",
    "proof": "experiments.proof.config:ProofConfig",
}
#: Words that are needed besides those that all must give.
MORE = {"chain": ["--build.input=i"], "inspect": ["--question=q"]}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_names_a_config_and_a_function(name: str) -> None:
    command = COMMANDS[name]
    assert dataclasses.is_dataclass(command.config_type())
    assert callable(resolve_name(f"remind.{command.function}"))
    assert set(command.positional) <= {field.name for field in dataclasses.fields(command.config_type())}


SHIPPED = sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name != "accelerate")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_shipped_config_is_taken_by_its_command(path: Path) -> None:
    kind = path.stem.split("_")[0]
    name = KINDS.get(kind) or next(name for name in COMMANDS if kind in name.split("-"))
    config = COMMANDS[name].config_type() if name in COMMANDS else resolve_name(name)
    needed = [field.name for field in dataclasses.fields(config) if field.default is field.default_factory is MISSING]
    words = [*(f"--{name}=x" for name in needed), *MORE.get(kind, ())]
    settings = parse(config, "", ["--config", str(path), *words])
    assert isinstance(settings, config)
    taken, given = flatten(as_dict(settings)), flatten(yaml.safe_load(path.read_text(encoding="utf-8")))
    # those of groups, too, arrive; names of choices and numbers, but no lists
    arrived = {key: taken.get(key) for key, value in given.items() if isinstance(value, bool | int | float)}
    assert arrived == {key: given[key] for key in arrived}
    # an installed `remind demo` does what `make demo` does
    assert name != "demo" or settings == config()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["build-stats"], "no command 'build-stats'; did you mean build-states?"),
        (["train"], "no command 'train'"),
        (["compare", "/no/one", "/no/two"], "/no/one"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        commands.main(argv)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


def test_nothing_heavy_is_imported_for_help() -> None:
    """In a fresh process: at the import of remind, for the help of the whole, then for that of each command."""
    helps = [["--help"], *([name, "--help"] for name in COMMANDS)]
    code = f"""
import contextlib, io, sys
def heavy(): return [name for name in {HEAVY} if name in sys.modules]
import remind
imported = {{"remind": heavy()}}
from remind import commands
for argv in {helps}:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        commands.main(argv)
    imported[argv[0]] = heavy()
print(imported)
"""
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    imported = ast.literal_eval(process.stdout)
    assert len(imported) == len(helps) + 1
    assert {name: libraries for name, libraries in imported.items() if libraries} == {}
