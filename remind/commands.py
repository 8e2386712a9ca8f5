"""The command `remind`: one subcommand for each job.

A subcommand is a config dataclass and a function that takes one. For `--help` and for mistakes on the command line only
the module of the config is imported; torch and transformers come with the module of the function.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from pkgutil import resolve_name


@dataclass(frozen=True)
class Command:
    """A subcommand of `remind`.

    Attributes:
        config: its config dataclass as "module:Name", in `remind`.
        function: what runs it, as "module:name" there; takes the config.
        positional: fields that may be given as leading plain words, in this order.
        repeatable: fields that may be given several times.
    """

    config: str
    function: str
    positional: tuple[str, ...] = ()
    repeatable: tuple[str, ...] = ()

    def config_type(self) -> type:
        """The config dataclass, imported; the first line of its docstring says what the command does."""
        config: type = resolve_name(f"remind.{self.config}")
        return config

    @property
    def help(self) -> str:
        return str(self.config_type().__doc__).partition("\n")[0]


COMMANDS = {
    "demo": Command("demo:DemoConfig", "demo:demo"),
    "train-sae": Command("train_sae.config:TrainSAEConfig", "train_sae:train_sae"),
    "check-sae": Command("train_sae.config:CheckSAEConfig", "grounding.check:check_sae"),
    "build-states": Command("build.config:BuildStatesConfig", "build.states:build", repeatable=("ask",)),
    "check-states": Command("train_pra.config:CheckStatesConfig", "check_states:check_states", ("states",)),
    "train-pra": Command("train_pra.config:TrainConfig", "check_states:train"),
    "export": Command("train_pra.config:ExportConfig", "train_pra.export:export"),
    "evaluate": Command("evaluation.config:EvaluateConfig", "memory.run:evaluate_and_show"),
    "answer": Command("ask:AnswerConfig", "ask:answer_and_show", repeatable=("ask",)),
    "compare": Command("evaluation.config:CompareConfig", "evaluation.compare:compare_and_show", ("first", "second")),
    "run-memory": Command("memory.config:RunMemoryConfig", "memory.run:run_memory"),
    "score-memory": Command("memory.config:ScoreMemoryConfig", "memory.score:score_and_show"),
    "train-memory": Command("memory_training.config:TrainMemoryConfig", "memory_training.train:train_memory"),
    "prompts": Command("commands:PromptsConfig", "commands:write_templates"),
    "inspect": Command("viewing.config:InspectConfig", "viewing.inspector:inspect_grounding"),
    "feature-pages": Command("viewing.config:FeaturePagesConfig", "viewing.workbench:write_feature_pages"),
    "compare-models": Command("viewing.config:CompareModelsConfig", "viewing.diff:compare_models"),
    "plot-run": Command("viewing.config:PlotRunConfig", "viewing.plots:plot_run"),
    "make-world": Command("testbed.ladder:MakeWorldConfig", "testbed.ladder:write_world"),
    "build-refmem": Command("refmem.config:RefMemConfig", "refmem.build:build_refmem"),
    "annotate-refmem": Command("refmem.config:AnnotateConfig", "refmem.annotate:write_pages"),
    "merge-annotations": Command("refmem.config:MergeConfig", "refmem.merge:merge"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the command `remind`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return
    if words[0] == "--version":
        import remind

        print(remind.__version__)
        return
    if words[0] not in COMMANDS:
        close = get_close_matches(words[0], COMMANDS, 1)
        hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(COMMANDS)}"
        print(f"error: no command {words[0]!r}; {hint}", file=sys.stderr)
        raise SystemExit(2)
    run(words[0], words[1:])


def run(name: str, argv: Sequence[str] | None = None) -> None:
    """Run a subcommand.

    Args:
        name: key of `COMMANDS`.
        argv: its arguments; None: those of this process. `--prompts FOLDER` may be among them.
    """
    from remind.core import cli

    command, argv = COMMANDS[name], list(sys.argv[1:] if argv is None else argv)
    if "--prompts" in argv[:-1]:
        place = argv.index("--prompts")
        _use_prompts(argv[place + 1])
        del argv[place : place + 2]
    cli.main(
        command.config_type(),
        f"remind.{command.function}",
        command.help,
        argv,
        prog=f"remind {name}",
        positional=command.positional,
        repeatable=command.repeatable,
    )


def _use_prompts(folder: str) -> None:
    from remind.core.errors import RemindError, told
    from remind.states.prompts import use

    try:
        use(folder)
    except RemindError as error:
        print(f"error: --prompts: {told(error)}", file=sys.stderr)
        raise SystemExit(2) from None


@dataclass
class PromptsConfig:
    """Write the prompt templates to a folder, to change them there and pass it as --prompts to any command."""

    out: str
    """Folder for them; FIELDS.md in it says what each may use. Templates that you do not change can be deleted."""


def write_templates(cfg: PromptsConfig) -> None:
    """See `PromptsConfig`. Raises ConfigError for a folder that is not empty."""
    from remind.core.errors import ConfigError
    from remind.core.files import write_text
    from remind.states.prompts import FOLDER, outline

    out = Path(cfg.out)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; choose another out")
    out.mkdir(parents=True, exist_ok=True)
    rows = ["| template | fields |", "|---|---|"]
    for path in sorted(FOLDER.glob("*.j2")):
        text = path.read_text(encoding="utf-8")
        write_text(out / path.name, text)
        rows.append(f"| {path.name} | {', '.join(sorted(outline(text, path)[0])) or '-'} |")
    write_text(out / "FIELDS.md", "\n".join(rows) + "\n")
    print(f"{len(rows) - 2} templates: {out}")


def usage() -> str:
    """The page of `remind --help`."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items())
    return (
        "usage: remind COMMAND [--config FILE] [--FIELD VALUE ...]\n\n"
        "Reflective memory for vision-language models.\n\n"
        f"commands:\n{rows}\n\n"
        "remind COMMAND --help explains every field; --print_config prints the settings as YAML.\n"
        "--prompts FOLDER, of any command: prompt templates of your own in place of ours (remind prompts writes them)."
    )
