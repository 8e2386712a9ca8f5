"""What an item asks about: states, a model, dialogues and a judge, for each seed, in the small and the full form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from experiments.paper.config import PaperConfig
from experiments.paper.items import from_file
from remind.core.errors import ConfigError, DataError
from remind.core.files import sha256_json
from remind.core.processes import locked
from remind.data.dialogue import Corpus, Dialogue, Question
from remind.evaluation.answerers import Answerer
from remind.evaluation.compare import Rows, Run, load_run
from remind.evaluation.config import EvaluateConfig
from remind.evaluation.run import Models, run_evaluation, with_images
from remind.evaluation.team import Team
from remind.perception.auxiliary import AuxiliaryLLM, ChatLLM
from remind.states import prompts
from remind.states.dataset import read_manifest
from remind.states.records import StateRecord
from remind.testbed.accuracy import MAX_NEW_TOKENS
from remind.testbed.built import build_world, train_saes
from remind.testbed.reader import Reader
from remind.testbed.world import make_world

#: The model of the small form.
SMALL_MODEL = "nano"


@dataclass(frozen=True)
class Setting:
    """The questions of one seed, and who answers and judges them.

    Attributes:
        evaluate: states, model, corpus, judge and sizes; conditions and out are an item's.
        llm: writes summaries of the altered order in place of `evaluate.llm.summary`.
        own_dialogues: whether the seed has dialogues of its own, or all seeds share theirs.
    """

    seed: int
    evaluate: EvaluateConfig
    llm: AuxiliaryLLM | None = None
    own_dialogues: bool = False


def settings(cfg: PaperConfig, trains: bool = False) -> list[Setting]:
    """One for each seed.

    Args:
        trains: each seed trains models of its own on what may be the same states.

    Raises:
        ConfigError: several seeds that a config file makes no use of, or a dry run.
    """
    if cfg.small:
        return [_world(cfg, seed) for seed in cfg.seeds]
    assert cfg.evaluate is not None
    assert cfg.out is not None
    given = from_file(EvaluateConfig, cfg.evaluate, cfg.out)
    if given.llm.dry_run is not None:
        raise ConfigError(f"{cfg.evaluate}: a dry run answers nothing; see its costs with remind evaluate")
    found = []
    for seed in cfg.seeds:
        states, model, *corpus = (
            text.replace("{seed}", str(seed)) for text in (given.states, given.model, *given.corpus)
        )
        found.append(Setting(seed, replace(given, states=states, model=model, corpus=corpus)))
    if not trains and len({(one.evaluate.states, one.evaluate.model) for one in found}) < len(found):
        raise ConfigError(f"{cfg.evaluate}: with several seeds, states or model must name {{seed}}")
    return found


def kind_of_question(cfg: PaperConfig) -> str:
    """Where the states have the kind of each question from, in words."""
    words = {"gold": "its gold dimension", "infer": "inferred by the LLM"}
    kinds = {read_manifest(one.evaluate.states).get("kind", "gold"): None for one in settings(cfg, trains=True)}
    return ", or ".join(words[kind] for kind in kinds)


def _world(cfg: PaperConfig, seed: int) -> Setting:
    """A world whose states the pipeline has built; made once, as the cache is shared by all items."""
    world, built, cache = replace(cfg.world, seed=seed), cfg.built, _cache(cfg)
    templates = {name: prompts.fingerprint(name) for name in (*prompts.RENDERED, *prompts.ASKED)}
    states = cache / sha256_json([asdict(world), asdict(built), templates])[:16] / "states"
    saes = small_saes(cfg, SMALL_MODEL, built.layers)
    with locked(cache / "world.lock"):
        if not states.exists():
            build_world(built, make_world(world), SMALL_MODEL, saes, states, cache / "parts")
    asked = EvaluateConfig(
        states=str(states),
        model=SMALL_MODEL,
        out="",
        corpus=[f"{states}.jsonl"],
        max_new_tokens=MAX_NEW_TOKENS,
        batch_size=32,
        bootstrap=100,
    )
    return Setting(seed, asked, ChatLLM({"summary": Reader(built.reader)}), own_dialogues=True)


def _cache(cfg: PaperConfig) -> Path:
    return Path(cfg.cache).expanduser() / "paper"


def small_saes(cfg: PaperConfig, model: str, layers: tuple[int, ...]) -> Path:
    """The small form's SAEs of these layers of a model; trained once."""
    built, cache = replace(cfg.built, layers=layers), _cache(cfg)
    with locked(cache / "world.lock"):
        name = sha256_json([model, built.layers, asdict(built.sae), built.talk])[:16]
        return train_saes(built, model, cache / f"sae-{name}")


def ask(
    setting: Setting,
    out: Path,
    conditions: Sequence[str],
    states: Path | None = None,
    answerer: Answerer | None = None,
) -> dict[str, Run]:
    """Answer, judge and score under each condition; what `out` holds of an earlier start is not asked again.

    Args:
        states: other states of the same questions.
        answerer: answers in place of the setting's model.

    Raises:
        As `evaluate` does.
    """
    changes: dict[str, Any] = {"out": str(out), "conditions": list(conditions)}
    if states is not None:
        changes["states"] = str(states)
    run_evaluation(replace(setting.evaluate, **changes), llm=setting.llm, answerer=answerer)
    return {name: load_run(out / name if len(conditions) > 1 else out) for name in conditions}


def answerer_of(setting: Setting) -> Answerer | None:
    """The setting's model, loaded once for several calls of `ask`; None: a server's, which loads nothing."""
    return None if setting.evaluate.answers == "server" else Models(with_images(setting.evaluate), Team()).answerer


def sources(records: Iterable[StateRecord], corpus: Corpus) -> Iterator[tuple[StateRecord, Dialogue, Question]]:
    """Each record with its dialogue and question. Raises DataError where the dialogue files do not have them."""
    questions = {question.id: question for question in corpus.questions}
    for record in records:
        if record.question_id not in questions:
            raise DataError("the question is not in the dialogue files", record=record.question_id)
        yield record, corpus.dialogue(record.dialogue_id), questions[record.question_id]


def pooled(parts: Iterable[tuple[Setting, Rows]]) -> dict[str, dict[str, Any]]:
    """Scored rows of all seeds together, by seed and question; those that a condition leaves out are not among them."""
    rows = {}
    for setting, own in parts:
        for name, row in own.items():
            if row.get("left_out") is not None:
                continue
            dialogue = f"{setting.seed}/{row['dialogue_id']}" if setting.own_dialogues else row["dialogue_id"]
            rows[f"{setting.seed}/{name}"] = {**row, "dialogue_id": dialogue}
    return rows


def by_seed(found: Mapping[str, Iterable[tuple[Setting, Rows]]]) -> dict[str, dict[str, float | None]]:
    """Accuracy of every system by seed."""
    result: dict[str, dict[str, float | None]] = {}
    for name, parts in found.items():
        for part in parts:
            values = [row["accuracy"] for row in pooled([part]).values() if row["accuracy"] is not None]
            result.setdefault(name, {})[str(part[0].seed)] = sum(values) / len(values) if values else None
    return result
