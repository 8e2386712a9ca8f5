"""Does reinforcement learning make a better memory than imitation, and what is attribution worth? The memory world.

Every seed learns an expert's replies first, its mistakes with them, and goes on from there in several ways: with the
rewards of MemBuilder and its attribution (ADRPO), with the rewards alone (GRPO), with controls, and with more of the
same imitation. All policies then live through dialogues that none was trained on, each with the memory that it has made
itself, and answer the questions at their ends. Intervals are over seeds and dialogues together.

What is done stays done: the same command goes on where it was stopped, and another list of seeds or arms adds to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from experiments.proof.statistics import estimate
from remind.core.errors import ConfigError
from remind.core.files import read_json, write_json, write_text
from remind.memory_training.config import TrainMemoryConfig
from sae.ranges import PositiveInt, Seed, check_ranges

if TYPE_CHECKING:
    from remind.memory_training.evaluate import Answerer, Report
    from remind.testbed.memory_world import Life

Control = Literal["random_role", "uniform", "null", "difference"]


@dataclass(frozen=True)
class Arm:
    """A way to go on from the first imitation.

    Attributes:
        rl: settings of reinforcement learning that differ; None: imitation goes on.
        control: what takes the place of the rewards or weights of MemBuilder.
    """

    title: str
    rl: Mapping[str, Any] | None = field(default_factory=dict)
    control: Control | None = None


#: In the order of the table. All but the first start from it.
ARMS = {
    "sft": Arm("imitation (SFT)", None),
    "sft_longer": Arm("imitation, as much processor time more as ADRPO takes", None),
    "adrpo": Arm("ADRPO"),
    "grpo": Arm("GRPO (α = 1)", {"alpha": 1.0}),
    "printed": Arm("ADRPO, Eq. 12 as printed", {"weighting": "printed"}),
    "random_role": Arm("control: α on a random one of the retrieved roles", control="random_role"),
    "uniform": Arm("control: the same mean weight for all roles", control="uniform"),
    "null": Arm("control: rewards of other rollouts", control="null"),
    "difference": Arm("each role by what its replies add to the reward", {"alpha": 1.0}, "difference"),
}


@dataclass
class PoliciesConfig:
    """Arms against each other on dialogues that none of them was trained on."""

    out: str
    """Folder of the runs, answers.json files and results."""
    sft: TrainMemoryConfig = field(default_factory=lambda: TrainMemoryConfig(""))
    """The first imitation. Of all three its out, seed and model are not read."""
    sft_longer: TrainMemoryConfig = field(default_factory=lambda: TrainMemoryConfig(""))
    """More of it."""
    rl: TrainMemoryConfig = field(default_factory=lambda: TrainMemoryConfig("", method="adrpo"))
    """Of every arm of reinforcement learning; the arms change its rl."""
    arms: tuple[str, ...] = tuple(ARMS)
    """Which of the arms, sft always."""
    seeds: tuple[Seed, ...] = (1, 2, 3, 4, 5)
    """Of the policies' first weights, of the order of sessions and of sampling; the test dialogues are the same."""
    dialogues: PositiveInt = 100
    """Test dialogues, each with 20 questions at its end."""
    resamples: PositiveInt = 4000
    """Of the bootstrap."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        self.arms, self.seeds = tuple(self.arms), tuple(self.seeds)
        if unknown := [name for name in self.arms if name not in ARMS]:
            raise ConfigError(f"no arm {unknown[0]!r}; there are {', '.join(ARMS)}")
        if len(set(self.seeds)) < len(self.seeds) or not self.seeds:
            raise ConfigError("seeds must be distinct, and at least one")


def policies(cfg: PoliciesConfig) -> dict[str, Any]:
    """Train what is not trained yet, evaluate and report.

    Raises:
        ConfigError: a run that was begun with other settings.
        RemindError: of the first run that failed; what was done stays.
    """
    out = Path(cfg.out)
    found: dict[str, list[list[Report]]] = {}
    for seed in cfg.seeds:
        for name in ARMS:
            if name == "sft" or name in cfg.arms:
                found.setdefault(name, []).append(_of_arm(cfg, name, seed))
    references = {title: [_reports(cfg, answer)] for title, answer in _references(cfg).items()}
    results = {"config": asdict(cfg), "rows": _rows(cfg, found, references)}
    write_json(out / "results.json", results)
    write_text(out / "table.md", table(results))
    print(table(results))
    return results


def _of_arm(cfg: PoliciesConfig, name: str, seed: int) -> list[Report]:
    """A report of every test dialogue; the arm is trained first where it is not."""
    from remind.memory_training.evaluate import Report, greedy
    from remind.memory_training.train import POLICY, train_memory
    from remind.models.load import load_backbone

    arm, home = ARMS[name], Path(cfg.out) / f"seed-{seed}"
    file = home / name / f"test-{cfg.dialogues}.json"
    if not file.exists():
        settings = cfg.rl if arm.rl is not None else cfg.sft if name == "sft" else cfg.sft_longer
        start = "pico" if name == "sft" else str(home / "sft" / POLICY)
        settings = replace(settings, out=str(home / name), seed=seed, model=start, resume=True)
        if arm.rl is not None:
            settings = replace(settings, rl=replace(settings.rl, **arm.rl))
        train_memory(settings, **({"task": controlled(arm.control, seed)} if arm.control else {}))
        trained = load_backbone(home / name / POLICY)
        write_json(file, [asdict(one) for one in _reports(cfg, greedy(trained.model, trained.tokenizer))])
    return [Report(**row) for row in read_json(file)]


def _reports(cfg: PoliciesConfig, answer: Answerer) -> list[Report]:
    from remind.memory_training.evaluate import evaluate

    return evaluate(answer, _lives(cfg))


def _lives(cfg: PoliciesConfig) -> list[Life]:
    """Dialogues of no training run, nor of the evaluation at the end of one."""
    from remind.testbed.memory_world import make_life

    world = cfg.rl.world
    return [make_life(world.seed, -1_000_001 - number, world.sessions) for number in range(cfg.dialogues)]


def _references(cfg: PoliciesConfig) -> dict[str, Answerer]:
    """Who needs no training: the expert that is imitated, one without mistakes, and policies of no use."""
    from remind.memory_training.pico import END, View, expert_reply
    from remind.testbed.memory_world import ORACLE, Expert

    def of(expert: Expert) -> Answerer:
        # one judgement of a session's turns for all roles
        return lambda views: [
            expert_reply(one, expert, Random(" ".join(turn.text for turn in one.meeting.turns))) for one in views
        ]

    def everything(view: View) -> str:
        return " ".join(f"ADD t{n}" for n in range(1, len(view.meeting.turns) + 1)) + f" {END}"

    world = cfg.rl.world
    return {
        "the expert that is imitated": of(Expert(world.blind, world.missed, world.kept)),
        "an expert without mistakes": of(ORACLE),
        "keeps everything, in every store": lambda views: [everything(one) for one in views],
        "keeps nothing": lambda views: [END for _ in views],
    }


def controlled(control: Control, seed: int) -> Any:
    """A class of task with other rewards or weights than MemBuilder's."""
    from remind.memory_training.episodes import Scores
    from remind.memory_training.membuilder import MemBuilderTask
    from remind.memory_training.pico import END
    from remind.memory_training.rewards import RETRIEVED, ROLES

    class Controlled(MemBuilderTask):
        def score(self, row: int, outcomes: Sequence[Any]) -> Scores:
            scores = super().score(row, outcomes)
            # a function of the replies, so that a resumed run is the same
            random = Random(f"{seed} {row} {outcomes}")
            rewards = {role: list(values) for role, values in scores.rewards.items()}
            weights = {role: list(values) for role, values in scores.weights.items()}
            if control == "null":
                rewards = {role: random.sample(values, len(values)) for role, values in rewards.items()}
            elif control == "difference":
                scorer = self.scorers[row]
                for place, role in enumerate(ROLES):
                    for n, replies in enumerate(outcomes):
                        without = [END if other == place else reply for other, reply in enumerate(replies)]
                        rewards[role][n] -= scorer.result(without).task
            elif control == "uniform":
                flat = [value for values in weights.values() for value in values]
                weights = {role: [sum(flat) / len(flat)] * len(values) for role, values in weights.items()}
            elif control == "random_role":
                weights = {role: [1.0] * len(outcomes) for role in ROLES}
                for n, replies in enumerate(outcomes):
                    retrieved = set(self.scorers[row].result(replies).retrieved)
                    if stores := [role for role in RETRIEVED if role in retrieved]:
                        weights[random.choice(stores)][n] = self.alpha
            return replace(scores, rewards=rewards, weights=weights)

    return Controlled


def _rows(
    cfg: PoliciesConfig, found: Mapping[str, list[list[Report]]], references: Mapping[str, list[list[Report]]]
) -> list[dict[str, Any]]:
    """Of each arm the means over seeds and dialogues, and its final questions less those of some other arms."""
    names = [str(number) for number in range(cfg.dialogues)]

    def values(reports: list[list[Report]], figure: str) -> Any:
        return np.array([[getattr(one, figure) for one in run] for run in reports])

    rows = []
    for name, reports in {**found, **references}.items():
        row: dict[str, Any] = {"arm": name, "title": ARMS[name].title if name in ARMS else name, "seeds": len(reports)}
        for figure in ("final", "rewarded", "held_out", "valid", "words"):
            row[figure] = estimate(values(reports, figure), names, cfg.resamples)
        for other in ("sft", "grpo") if name in found else ():
            if other in found and other != name:
                less = values(reports, "final") - values(found[other], "final")
                row[f"less {other}"] = estimate(less, names, cfg.resamples)
        rows.append(row)
    return rows


def table(results: Mapping[str, Any]) -> str:
    """The rows as Markdown."""
    lines = ["| | final questions | less SFT | less GRPO | rewarded | held out | valid replies | words kept |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in results["rows"]:
        cells = [row["title"], *(_percent(row.get(name)) for name in ("final", "less sft", "less grpo"))]
        cells += [f"{100 * row[name]['value']:.1f}" for name in ("rewarded", "held_out", "valid")]
        lines.append(f"| {' | '.join(cells)} | {row['words']['value']:.0f} |")
    return "\n".join(lines) + "\n"


def _percent(one: Mapping[str, float] | None) -> str:
    return "" if one is None else f"{100 * one['value']:.1f} [{100 * one['low']:.1f}, {100 * one['high']:.1f}]"


if __name__ == "__main__":
    from remind.core.cli import main

    main(PoliciesConfig, policies, __doc__)
