"""The items: what each is, what its full form needs; and from a name to result.json, table.md and a
picture. Imports nothing heavy."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from experiments.paper.config import PaperConfig
from remind.core.cli import parse
from remind.core.errors import ConfigError
from remind.core.files import read_json, write_json, write_text
from remind.core.run_folder import RunFolder
from remind.evaluation.config import EvaluateConfig

if TYPE_CHECKING:
    from sae.figures import Picture

C = TypeVar("C")
RESULT = "result.json"
_FORMAT = "remind-paper-item"
#: What an option must name for a full form, and where the paper's settings are.
NEEDS = {
    "evaluate": "config file of remind evaluate, such as configs/paper/evaluate_base.yaml",
    "systems": "finished runs or answers as NAME=PATH, or runs of memory systems",
    "benchmark": "files of the benchmark",
    "runs": "run folders of remind train-pra, trained with configs/paper/pra_full.yaml or another",
    "train": "config files of remind train-pra, such as configs/paper/pra_lora.yaml and "
    "configs/paper/objective_recommended.yaml",
    "cost": "config file of experiments.cost, such as configs/inference_cost.yaml",
}


class Result(NamedTuple):
    """What an item makes.

    Attributes:
        data: for result.json. tables: Markdown. picture: None: there is none, or the item has written it.
    """

    data: dict[str, Any]
    tables: str
    picture: Picture | None


@dataclass(frozen=True)
class Item:
    """A table or figure.

    Attributes:
        title: what it shows.
        maker: module and function, `PaperConfig` → `Result`.
        needs: options that the full form cannot do without, keys of `NEEDS`.
    """

    title: str
    maker: str
    needs: tuple[str, ...]

    def make(self, cfg: PaperConfig) -> Result:
        """Make it. Raises as what it is made of does."""
        module, _, function = self.maker.partition(":")
        result: Result = getattr(import_module(f"experiments.paper.{module}"), function)(cfg)
        return result

    def check(self, name: str, cfg: PaperConfig) -> None:
        """Raises ConfigError that names all inputs that the full form lacks: options, and files that are not there."""
        if cfg.small:
            return
        lacking = [f"--{option} ({NEEDS[option]})" for option in self.needs if not getattr(cfg, option)]
        files = [*cfg.train, *cfg.benchmark, *cfg.runs, *(text.partition("=")[2] or text for text in cfg.systems)]
        files += [path for path in (cfg.evaluate, cfg.cost, cfg.labels, cfg.launcher) if path is not None]
        if cfg.evaluate is not None and Path(cfg.evaluate).is_file():
            asked = from_file(EvaluateConfig, cfg.evaluate, str(cfg.out))
            named = [text.replace("{seed}", str(seed)) for seed in cfg.seeds for text in (asked.states, *asked.corpus)]
            files += dict.fromkeys(named)
        absent = [path for path in files if not Path(path).expanduser().exists()]
        wrong = [f"{name} needs {'; '.join(lacking)}"] * bool(lacking)
        wrong += [f"there is no {', '.join(absent)}"] * bool(absent)
        if wrong:
            raise ConfigError("; ".join([*wrong, "or --small true"]))


def from_file(kind: type[C], path: str, out: str | Path) -> C:
    """A config of another command from its file; mistakes in it end the program as they end that command."""
    return parse(kind, f"config of {kind.__name__}", ["--config", path, "--out", str(out)])


ITEMS = {
    "fig4": Item(
        "Figure 4: (a-c) strategy, markers and summary, each added to retrieved evidence and removed from the whole; "
        "(d) x0, x1, x2",
        "ablation:fig4",
        ("evaluate",),
    ),
    "fig4_trained": Item(
        "Figure 4 (a-c) with training: models taught by evidence with strategy, markers and summary, each added and "
        "removed; answers from x0",
        "trained:fig4_trained",
        ("evaluate", "train"),
    ),
    "table1": Item(
        "Tables 1 and 4-7: systems by format and dimension: Acc, MemR, B1, F1, share of outputs that parse",
        "systems:table1",
        ("evaluate", "systems"),
    ),
    "fig5": Item(
        "Figure 5: α by β: evidence in marked turns, and Acc and MemR of answers from x1",
        "grounding:fig5",
        ("evaluate",),
    ),
    "fig11": Item(
        "Figure 11: evidence in marked turns by budget, along the pipeline", "grounding:fig11", ("evaluate",)
    ),
    "fig12_table8": Item(
        "Figure 12 and Table 8: tokens, seconds and operations of a question by condition and length of the history",
        "costs:fig12_table8",
        ("evaluate", "cost"),
    ),
    "table3": Item(
        "Table 3: judges against people, by dimension; writes the label sheet, then reads it (--labels)",
        "judging:table3",
        ("evaluate",),
    ),
    "table2": Item("Table 2: statistics of the benchmark", "benchmark:table2", ("benchmark",)),
    "fig14": Item(
        "Figure 14: training trajectory: shares of the loss, and divergence of student and teacher",
        "trajectory:fig14",
        ("runs",),
    ),
    "fig6": Item(
        "Figure 6: one question answered by two systems, with the grounding of the question",
        "cases:fig6",
        ("evaluate", "systems"),
    ),
}


def listing() -> str:
    """Every item, and what its full form needs, as text."""
    lines = []
    for name, item in ITEMS.items():
        lines += [
            f"{name}: {item.title}",
            f"    needs {', '.join(f'--{option}' for option in item.needs)}, or --small true",
        ]
    return "\n".join(lines)


def paper(cfg: PaperConfig) -> None:
    """List the items, or make one and print its table.

    Raises:
        ConfigError: no such item, inputs that it lacks, or an `out` that holds another item.
        As the parts that an item is made of.
    """
    if cfg.action == "list":
        print(listing())
        return
    if cfg.item not in ITEMS:
        raise ConfigError(f"no item {cfg.item!r}; there are {', '.join(ITEMS)}")
    item = ITEMS[cfg.item]
    if cfg.out is None:
        raise ConfigError(f"{cfg.item} needs --out, a folder")
    item.check(cfg.item, cfg)
    out, form = Path(cfg.out), "small" if cfg.small else "full"
    if (out / RESULT).exists():
        before = read_json(out / RESULT)
        if not isinstance(before, dict) or (before.get("item"), before.get("form")) != (cfg.item, form):
            raise ConfigError(f"{out} holds the result of something else; choose another out")
    from experiments.paper.settings import kind_of_question
    from remind.build.plan import versions
    from remind.evaluation.run import machine

    started = time.perf_counter()
    with RunFolder(out).held():
        result = item.make(cfg)
        kind = kind_of_question(cfg) if "evaluate" in item.needs else None
        about = {"format": _FORMAT, "item": cfg.item, "title": item.title, "form": form, "seeds": list(cfg.seeds)}
        seconds = {"seconds": round(time.perf_counter() - started, 1)}
        context = {"config": asdict(cfg), "machine": machine("cpu"), "versions": versions()}
        head = f"# {item.title}\n\nForm: {form}. Seeds: {', '.join(map(str, cfg.seeds))}."
        head += f" Kind of question: {kind}." if kind else ""
        write_text(out / "table.md", f"{head}\n\n" + result.tables.rstrip() + "\n")
        if result.picture is not None:
            result.picture.save(out / f"{cfg.item}.png")
        write_json(out / RESULT, {**about, "kind_of_question": kind, **result.data, **seconds, **context})
    print(f"{result.tables.rstrip()}\n\n{out / RESULT}, {seconds['seconds']:.0f} s")
