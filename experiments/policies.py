"""Does reinforcement learning make a better memory than imitation, and what is attribution worth? The memory world.

Every seed learns an expert's replies first, its mistakes with them, and goes on from there in several ways: with the
rewards of MemBuilder and its attribution (ADRPO), with the rewards alone (GRPO), with controls, and with more of the
same imitation; as SaliMory's roles with one kind of its rewards after another. All policies then live through dialogues
that none was trained on, each with the memory that it has made itself, and answer the questions at their ends.
Intervals are over seeds and dialogues together.

What is done stays done: the same command goes on where it was stopped, and another list of seeds or arms adds to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from experiments.proof.statistics import estimate
from remind.core.errors import ConfigError
from remind.core.files import read_json, write_json, write_text
from remind.core.run_folder import RunFolder, as_dict, flatten
from remind.evaluation.tables import markdown_table, percent
from remind.memory_training.config import Method, TrainMemoryConfig
from sae.ranges import PositiveInt, Resamples, Seed, check_ranges

if TYPE_CHECKING:
    from remind.memory_training.evaluate import Answerer

#: Of a test dialogue by name.
Figures = dict[str, float]
Control = Literal["random_role", "null_rewards"]


@dataclass(frozen=True)
class Arm:
    """A way to go on from the first imitation.

    Attributes:
        settings: field of `PoliciesConfig` with its settings.
        changes: settings of its rl, of SaliMory's arms of its salimory, that differ.
        control: what takes the place of the rewards or weights of MemBuilder.
        start: the arm whose policy it begins with; None: a policy with random weights.
    """

    title: str
    settings: str = "rl"
    changes: Mapping[str, Any] = field(default_factory=dict)
    control: Control | None = None
    start: str | None = "sft"


def _salimory(title: str, **changes: Any) -> Arm:
    return Arm(title, "salimory", changes, start="salimory_sft")


_ANSWERS = {"memory_penalty": 0.0, "memory_bonus": 0.0, "profile_weight": 0.0, "filter_weight": 0.0}
#: In the order of the tables.
ARMS = {
    "sft": Arm("imitation (SFT)", "sft", start=None),
    "sft_longer": Arm("imitation, as much processor time more as ADRPO takes", "sft_longer"),
    "adrpo": Arm("ADRPO"),
    "grpo": Arm("GRPO (α = 1)", changes={"alpha": 1.0}),
    "printed": Arm("ADRPO, Eq. 12 as printed", changes={"weighting": "printed"}),
    "random_role": Arm("control: α on a random one of the retrieved roles", control="random_role"),
    "density": Arm("ADRPO, a task reward for one session in eight", changes={"density": 0.125}),
    "null_rewards": Arm("control: rewards of other rollouts", control="null_rewards"),
    "salimory_sft": Arm("SaliMory: imitation (SFT)", "salimory_sft", start=None),
    "salimory_r1": _salimory("answers alone (R1)", **_ANSWERS, boost=0.0, utilize=0.0),
    "salimory_r3": _salimory("R1, R2 and R3", boost=0.0, utilize=0.0),
    "salimory_boost": _salimory("the same and the booster's contrast", utilize=0.0),
    "salimory": _salimory("the same and the utilizer's contrast: SaliMory"),
    "salimory_e2": _salimory("SaliMory, Appendix E.2 as printed", e2_literal=True),
}
#: Figures of the tables by the arm that others are measured against.
FIGURES = {
    "sft": {"rewarded": "rewarded", "held_out": "held out", "valid": "valid replies", "words": "words kept"},
    "salimory_sft": {
        "factual": "factual",
        "vague": "vague",
        "profile": "μ",
        "filter": "κ",
        "valid": "valid replies",
        "words": "words kept",
    },
}


_PARTS = ("sft", "sft_longer", "rl", "salimory_sft", "salimory")


@dataclass
class PoliciesConfig:
    """Arms against each other on dialogues that none of them was trained on."""

    out: str
    """Folder of the runs, answers.json files and results."""
    sft: TrainMemoryConfig = field(default_factory=lambda: TrainMemoryConfig(""))
    """The first imitation. Of this and the others out, seed and model are not read."""
    sft_longer: TrainMemoryConfig = field(default_factory=lambda: TrainMemoryConfig(""))
    """More of it."""
    rl: TrainMemoryConfig = field(default_factory=lambda: TrainMemoryConfig("", method="adrpo"))
    """Of every arm of reinforcement learning; the arms change its rl."""
    salimory_sft: TrainMemoryConfig = field(default_factory=lambda: TrainMemoryConfig("", method="salimory_sft"))
    """The first imitation of SaliMory's roles."""
    salimory: TrainMemoryConfig = field(default_factory=lambda: TrainMemoryConfig("", method="salimory"))
    """Of every arm of SaliMory; the arms change its salimory."""
    arms: tuple[str, ...] = tuple(ARMS)
    """Which of the arms, and always those that they start from."""
    seeds: tuple[Seed, ...] = (1, 2, 3, 4, 5)
    """Of the policies' first weights, of the order of sessions and of sampling; the test dialogues are the same."""
    dialogues: PositiveInt = 100
    """Test dialogues, each with 20 questions at its end."""
    resamples: Resamples = 4000
    """Of the bootstrap."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        self.arms, self.seeds = tuple(self.arms), tuple(self.seeds)
        if unknown := [name for name in self.arms if name not in ARMS]:
            raise ConfigError(f"no arm {unknown[0]!r}; there are {', '.join(ARMS)}")
        for name in _PARTS:
            method, wanted = getattr(self, name).method, {"sft_longer": "sft", "rl": "adrpo"}.get(name, name)
            if method != wanted:
                raise ConfigError(f"{name}.method must be {wanted}, not {method}")
        if not self.arms:
            raise ConfigError("at least one of arms is needed")
        if len(set(self.seeds)) < len(self.seeds) or not self.seeds:
            raise ConfigError("seeds must be distinct, and at least one")


def policies(cfg: PoliciesConfig) -> dict[str, Any]:
    """Train what is not trained yet, evaluate and report.

    Raises:
        ConfigError: a run that was begun with other settings.
        RemindError: of the first run that failed; what was done stays.
    """
    out = Path(cfg.out)
    found: dict[str, list[list[Figures]]] = {}
    wanted = {*cfg.arms, *(ARMS[name].start for name in cfg.arms)}
    with RunFolder(out).held():
        # what is not read of a setting's parts may differ
        free = {f"{part}.{name}" for part in _PARTS for name in ("out", "seed", "model", "resume")}
        free |= {"out", "arms", "seeds", "dialogues", "resamples"}
        RunFolder(out).claim(flatten(as_dict(cfg)), resume=True, free=free)
        for seed in cfg.seeds:
            for name in ARMS:
                if name in wanted:
                    found.setdefault(name, []).append(_of_arm(cfg, name, seed))
    rows = []
    for start in (name for name in FIGURES if name in found):
        arms = {name: reports for name, reports in found.items() if start in (name, ARMS[name].start)}
        method = getattr(cfg, ARMS[start].settings).method
        references = {title: [_reports(cfg, method, answer)] for title, answer in _references(method).items()}
        rows += _rows(cfg, start, arms, references)
    results = {"config": asdict(cfg), "rows": rows}
    write_json(out / "results.json", results)
    write_text(out / "table.md", table(results))
    print(table(results))
    return results


def _of_arm(cfg: PoliciesConfig, name: str, seed: int) -> list[Figures]:
    """Figures of every test dialogue; the arm is trained first where it is not."""
    from remind.memory_training.evaluate import greedy
    from remind.memory_training.train import POLICY, train_memory
    from remind.models.backbone import load_backbone

    arm, home = ARMS[name], Path(cfg.out) / f"seed-{seed}"
    file = home / name / f"test-{cfg.dialogues}.json"
    if not file.exists():
        start = str(home / arm.start / POLICY) if arm.start else "pico"
        settings = replace(getattr(cfg, arm.settings), out=str(home / name), seed=seed, model=start, resume=True)
        part = "salimory" if arm.settings == "salimory" else "rl"
        settings = replace(settings, **{part: replace(getattr(settings, part), **arm.changes)})
        train_memory(settings, **({"task": controlled(arm.control, seed)} if arm.control else {}))
        trained = load_backbone(home / name / POLICY)
        write_json(file, _reports(cfg, settings.method, greedy(trained.model, trained.tokenizer)))
    found: list[Figures] = read_json(file)
    return found


def _reports(cfg: PoliciesConfig, method: Method, answer: Answerer) -> list[Figures]:
    """Figures of dialogues of no training run, nor of the evaluation at the end of one."""
    from remind.memory_training.evaluate import remembered
    from remind.testbed.memory_world import make_life

    world = cfg.rl.world
    lives = [make_life(world.seed, -1_000_001 - number, world.sessions) for number in range(cfg.dialogues)]
    return remembered(method, answer, lives)


def _references(method: Method) -> dict[str, Answerer]:
    """Who needs no training: the expert that is imitated, one without mistakes, and policies of no use."""
    from remind.memory_training import pico
    from remind.memory_training import salimory as sali
    from remind.testbed.memory_world import ORACLE, Expert

    expert, end = Expert(), pico.END

    def each(reply: Callable[[Any], str]) -> Answerer:
        return lambda views: list(map(reply, views))

    if method == "salimory_sft":

        def everything_told(asked: sali.Asked) -> str:
            if asked.turn:
                return sali.YES if asked.role == "filter" else f"ADD FACT {asked.turn.text} {end}"
            return " ".join([*(f"m{n}" for n in range(1, len(asked.entries) + 1)), end])

        return {
            "the expert that is imitated": each(lambda one: sali.expert_reply(one, expert, Random(one.prompt()))),
            "an expert without mistakes": each(lambda one: sali.expert_reply(one, ORACLE, Random(one.prompt()))),
            "keeps everything, and tells all of it": each(everything_told),
            "keeps nothing": each(lambda one: sali.NO if one.role == "filter" else end),
        }

    def of(expert: Expert) -> Answerer:
        # one judgement of a session's turns for all roles
        return each(lambda one: pico.expert_reply(one, expert, Random(" ".join(t.text for t in one.meeting.turns))))

    def everything(view: pico.View) -> str:
        return " ".join(f"ADD t{n}" for n in range(1, len(view.meeting.turns) + 1))

    return {
        "the expert that is imitated": of(expert),
        "an expert without mistakes": of(ORACLE),
        "keeps everything, in every store": each(lambda view: f"{everything(view)} {end}"),
        "keeps nothing": each(lambda view: end),
    }


def controlled(control: Control, seed: int) -> Any:
    """A class of task with other rewards or weights than MemBuilder's."""
    from remind.memory_training.episodes import Scores
    from remind.memory_training.membuilder import MemBuilderTask
    from remind.memory_training.rewards import RETRIEVED, ROLES

    class Controlled(MemBuilderTask):
        def score(self, row: int, outcomes: Sequence[Any]) -> Scores:
            scores = super().score(row, outcomes)
            # a function of the replies, so that a resumed run is the same
            random = Random(f"{seed} {row} {outcomes}")
            rewards = {role: list(values) for role, values in scores.rewards.items()}
            weights = {role: list(values) for role, values in scores.weights.items()}
            if control == "null_rewards":
                rewards = {role: random.sample(values, len(values)) for role, values in rewards.items()}
            elif control == "random_role":
                weights = {role: [1.0] * len(outcomes) for role in ROLES}
                for n, replies in enumerate(outcomes):
                    retrieved = set(self.scorers[row].results([replies])[0].retrieved)
                    if stores := [role for role in RETRIEVED if role in retrieved]:
                        weights[random.choice(stores)][n] = self.alpha
            return replace(scores, rewards=rewards, weights=weights)

    return Controlled


def _rows(
    cfg: PoliciesConfig,
    start: str,
    found: Mapping[str, list[list[Figures]]],
    references: Mapping[str, list[list[Figures]]],
) -> list[dict[str, Any]]:
    """Of each arm the means over seeds and dialogues, and its final questions less those of some other arms."""
    names = [str(number) for number in range(cfg.dialogues)]

    def values(reports: list[list[Figures]], figure: str) -> Any:
        return np.array([[one[figure] for one in run] for run in reports])

    rows = []
    for name, reports in {**found, **references}.items():
        title = ARMS[name].title if name in ARMS else name
        row: dict[str, Any] = {"arm": name, "start": start, "title": title, "seeds": len(reports)}
        for figure in ("final", *FIGURES[start]):
            row[figure] = estimate(values(reports, figure), names, cfg.resamples)
        for other in (start, "grpo") if name in found else ():
            if other in found and other != name:
                less = values(reports, "final") - values(found[other], "final")
                row[f"less {other}"] = estimate(less, names, cfg.resamples)
        rows.append(row)
    return rows


def table(results: Mapping[str, Any]) -> str:
    """The rows as Markdown, a table for each way to remember."""
    tables = []
    for start, figures in FIGURES.items():
        rows = [row for row in results["rows"] if row["start"] == start]
        less = [start, *(["grpo"] if start == "sft" else [])]
        heads = ["", "final questions", *("less GRPO" if one == "grpo" else "less SFT" for one in less)]
        body = []
        for row in rows:
            shares = [row["final"], *(row.get(f"less {one}") for one in less)]
            cells = [row["title"], *(percent(one, interval=True) for one in shares)]
            values = {name: row[name]["value"] for name in figures}
            cells += [f"{value:.0f}" if name == "words" else f"{100 * value:.1f}" for name, value in values.items()]
            body.append(cells)
        tables += [markdown_table([*heads, *figures.values()], body)] if rows else []
    return "\n".join(tables)


if __name__ == "__main__":
    from remind.core.cli import main

    main(PoliciesConfig, policies, __doc__)
