"""Every number in every config: what is no number, or far out of range, is refused before any work starts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import import_module
from itertools import chain
from math import inf, nan
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest

from remind.build.config import BuildStatesConfig
from remind.commands import COMMANDS, main
from remind.core.errors import ConfigError
from remind.llm.endpoints import LLMConfig
from sae import ConfigError as SAEConfigError
from sae.ranges import Share, check_ranges

ROOT = Path(__file__).parents[2]
#: Besides NaN and infinity, which nothing takes.
NUMBERS = (-1, 0, 10**22)
#: What a config cannot be made without.
NEEDED: dict[str, dict[str, Any]] = {
    "ChainConfig": {"build": BuildStatesConfig("x", "x")},
    "Edge": {"student": 1, "teacher": 2},
    "ExportOfficialConfig": {"benchmark": "locomo"},
    "InspectConfig": {"question": "x"},
    "MemoryExperimentConfig": {"item": "reranker"},
    "MemoryKeysConfig": {"data": ["x"]},
    "PublishedConfig": {"data": ["x"]},
    "PlotRunConfig": {"run": ["x"]},
    "PretrainConfig": {"single": 0},
}
#: Why a field takes 0, and which ones do.
ZERO = {
    "a seed": """
        AnnotateConfig.seed BenchConfig.dev_seed BenchConfig.test_seed ChainConfig.seeds ChainConfig.fold_seed
        ChooseConfig.seeds ClusterConfig.seed CompareConfig.seed DemoConfig.seed EvaluateConfig.seed
        FaithfulnessConfig.seed FilterConfig.seed ItemsConfig.seed LabelConfig.seed LadderConfig.seed PaperConfig.seeds
        ProofConfig.seeds ReaderConfig.seed RefMemConfig.seed SAETrainConfig.seed ScoreOfficialConfig.seed
        ScoreRetrievalConfig.seed SplitConfig.seed StabilityConfig.seeds TrainConfig.seed WorldConfig.seed
        PoliciesConfig.seeds PretrainConfig.seed InsideConfig.seed MemoryExperimentConfig.seeds RerankerConfig.seed
        ScoreMemoryConfig.seed MemoryWorldConfig.seed TrainMemoryConfig.seed""",
    "a number that counts from 0: a layer, a level, a fold": """
        BuiltConfig.layers FeaturePagesConfig.layers InferenceCostConfig.sae_layers TrainSAEConfig.layers
        Edge.student Edge.teacher
        Knobs.hard_levels Objective.hard_levels StabilityConfig.hard_levels ChainConfig.sft_levels
        ChainConfig.only_folds""",
    "none of them, never, or in this process alone": """
        SessionConfig.rewrites
        AnnotateConfig.around BenchConfig.watched BuildStatesConfig.workers
        ChainConfig.dev_dialogues ChainConfig.dev_questions ChainConfig.trace_every DemoConfig.workers
        EndpointConfig.retries EvaluateConfig.examples FilterConfig.length_slack FilterConfig.blind_draws
        GroundingConfig.budget_tokens GroundingConfig.window GroundingConfig.cached_dialogues LabelConfig.labelled
        LadderConfig.decoys ProofConfig.workers RetrieveConfig.whole_tokens SAETrainConfig.warmup_steps
        RunMemoryConfig.shown StabilityConfig.workers TraceConfig.every
        TrainSAEConfig.image_tokens TrainSAEConfig.loss_windows TrainSAEConfig.checkpoint_every
        FeaturePagesConfig.image_tokens CheckSAEConfig.loss_windows
        WorldConfig.train WorldConfig.dev WorldConfig.test WorldConfig.contrary""",
    "a share or a decay, which may be nothing": """
        BuildStatesConfig.max_failed DemoConfig.noise Edge.alpha GroundingConfig.lam
        TrainerConfig.guard_entropy_share Objective.ema_decay
        Knobs.lambda_hard Knobs.ema_decay LabelConfig.noise LadderConfig.missed_marks LadderConfig.false_marks
        LadderConfig.wrong_summaries Objective.lambda_hard PretrainConfig.single PretrainConfig.multi
        PretrainConfig.easy ProofConfig.wrong_summaries ReaderConfig.errors ReaderConfig.overlooked RefMemConfig.train
        RetrieveConfig.lexical_context RetrieveConfig.dense_context SAETrainConfig.decay_share SAETrainConfig.betas
        SplitConfig.train SplitConfig.dev StabilityConfig.lambda_hard TrainSAEConfig.held_out
        TrainerConfig.warmup_steps WorldConfig.second_voice WorldConfig.leads MemoryExperimentConfig.cited_useful
        MemoryExperimentConfig.cited_useless RerankerConfig.ema RerankerConfig.explore MemoryWorldConfig.blind
        MemoryWorldConfig.missed MemoryWorldConfig.kept RewardConfig.length_penalty TrainMemoryConfig.warmup
        MemoryWorldConfig.blurred SaliMoryConfig.recall_weight SaliMoryConfig.similarity""",
    "a weight, price, width, rate or temperature that switches something off": """
        ChainConfig.sft_lr ChainConfig.pra_lr DataConfig.temperature Edge.gamma EndpointConfig.temperature
        EndpointConfig.price_prompt EndpointConfig.price_completion GroundingConfig.alpha GroundingConfig.beta
        GroundingConfig.sigma GroundingConfig.smooth_turns TrainerConfig.guard_ce_rise Knobs.lr Knobs.gamma
        PretrainConfig.weight_decay PretrainConfig.remarks PretrainConfig.focus PretrainConfig.options
        PaperConfig.alphas PaperConfig.betas PretrainConfig.letters RetrieveConfig.sigma SAETrainConfig.aux_coefficient
        StabilityConfig.lr StabilityConfig.gamma CheckSAEConfig.sink_factor TrainSAEConfig.sink_factor
        TrainerConfig.learning_rate TrainerConfig.max_grad_norm TrainerConfig.weight_decay
        PolicyGradientConfig.beta PolicyGradientConfig.kl_stop
        RewardConfig.core_free RewardConfig.free_below TrainMemoryConfig.weight_decay SaliMoryConfig.memory_penalty
        SaliMoryConfig.memory_bonus SaliMoryConfig.profile_weight SaliMoryConfig.filter_weight SaliMoryConfig.boost
        SaliMoryConfig.utilize""",
}
#: Fields that take -1 and 0: weights of a logit, thresholds in standard deviations, and a baseline of rewards.
SIGNED = """
    FusionConfig.summed FusionConfig.summed_context FusionConfig.each FusionConfig.each_context FusionConfig.dense
    FusionConfig.dense_context FusionConfig.bm25 FusionConfig.bm25_context FusionConfig.speaker FusionConfig.date
    FusionConfig.asks FusionConfig.answers FusionConfig.length GroundingConfig.threshold SegmentConfig.depth
    RerankerConfig.baseline TrainerConfig.max_steps"""
ALLOWED = {(name, number) for name in SIGNED.split() for number in (-1, 0)}
ALLOWED |= {(name, 0) for names in ZERO.values() for name in names.split()}


def config_classes() -> list[type]:
    """The config classes of all commands and experiments, and those in them."""
    roots = [command.config_type() for command in COMMANDS.values()]
    for path in sorted((ROOT / "experiments").rglob("*.py")):
        for name in re.findall(r"^    main\(\s*(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            roots.append(getattr(import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)), name))
    found: dict[type, None] = {}
    waiting: list[Any] = roots
    while waiting:
        hint = waiting.pop()
        if is_dataclass(hint) and isinstance(hint, type) and hint not in found:
            found[hint] = None
            waiting += get_type_hints(hint).values()
        waiting += get_args(hint)
    return sorted(found, key=lambda kind: kind.__name__)


def with_number(hint: Any, number: float) -> Iterator[Any]:
    """Values of a type in which the number stands wherever one may."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in (int, float):
        yield number
    elif origin is Annotated:
        yield from with_number(args[0], number)
    elif origin is tuple and args[-1] is not ...:
        yield from zip(*(with_number(arm, number) for arm in args), strict=True)
    else:
        inner = chain.from_iterable(with_number(arm, number) for arm in args)
        yield from ((value,) if origin is tuple else [value] if origin is list else value for value in inner)


def make(kind: type, **values: Any) -> None:
    """A config of this class, as a command would have it."""
    needed = [field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]
    config = kind(**dict.fromkeys(needed, "x") | NEEDED.get(kind.__name__, {}) | values)
    if kind.__name__ == "EndpointConfig":
        LLMConfig(default=config)


@pytest.mark.parametrize("kind", config_classes(), ids=lambda kind: kind.__name__)
def test_numbers_are_refused_or_allowed_for_a_reason(kind: type) -> None:
    make(kind)
    taken, messages = set(), {}
    for field, hint in get_type_hints(kind, include_extras=True).items():
        for number in (nan, inf, -inf, *NUMBERS):
            for value in with_number(hint, number):
                try:
                    make(kind, **{field: value})
                    taken.add((f"{kind.__name__}.{field}", number))
                except (ConfigError, SAEConfigError) as error:
                    known = r"edge 0 -> 0: [^\n]*|edges: [^\n]* is not \(student, teacher[^\n]*"
                    messages[str(error)] = rf"[^\n]*\.{field}\b[^\n]* must be [^\n]*, not [^\n]*|{known}"
    assert taken == {entry for entry in ALLOWED if entry[0].startswith(f"{kind.__name__}.")}
    assert [message for message, form in messages.items() if not re.fullmatch(form, message)] == []


def test_all_that_is_allowed_belongs_to_a_config() -> None:
    kinds = {kind.__name__ for kind in config_classes()}
    assert len(kinds) > 40
    assert {name.split(".")[0] for name, _ in ALLOWED} <= kinds


@dataclass
class Mixed:
    """Of each kind one."""

    share: Share | None = None
    pairs: tuple[tuple[Share, int], ...] = ()
    names: str | list[str] = "a"
    kind: Literal["x", "y"] = "x"


def test_a_refusal_names_the_place_and_the_value() -> None:
    for good in (Mixed(1, ((0.5, 3), (0, -3))), Mixed(names=["a"]), Mixed(pairs=[[0.5, 3]])):  # type: ignore[arg-type]
        check_ranges(good, ConfigError)
    for bad, message in (
        (Mixed(share=1.5), "Mixed.share must be at least 0 and at most 1, not 1.5"),
        (Mixed(share=True), "Mixed.share must be a number, not True"),
        (Mixed(pairs=((0.5, 3), (2, 3))), "Mixed.pairs[1][0] must be at least 0 and at most 1, not 2"),
        (Mixed(pairs=((0.5, 3, 1),)), "Mixed.pairs[0] must be 2 values, not (0.5, 3, 1)"),  # type: ignore[arg-type]
        (Mixed(pairs=((0.5, 3.5),)), "Mixed.pairs[0][1] must be an integer, not 3.5"),  # type: ignore[arg-type]
        (Mixed(names=3), "Mixed.names must be text, not 3"),  # type: ignore[arg-type]
        (Mixed(kind="z"), "Mixed.kind must be one of x, y, not 'z'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError) as refused:
            check_ranges(bad, ConfigError)
        assert str(refused.value) == message


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train-sae --out x --trainer.betas [2,3]", r"SAETrainConfig\.betas\[0\] must be [^\n]*, not 2\.0"),
        ("train-sae --out x --trainer.tokens 0", r"SAETrainConfig\.tokens must be at least 1 [^\n]*, not 0"),
        ("train-pra --states x --out x --lora.r -1", r"LoraConfig\.r must be at least 1 [^\n]*, not -1"),
        ("build-states --input x --out x --grounding.fuse.sigma .nan", r"FusionConfig\.sigma must be [^\n]*, not nan"),
        ("build-states --input x --out x --llm.judge.timeout .nan", r"LLMConfig\.judge\.timeout [^\n]*, not nan"),
    ],
)
def test_a_command_refuses_in_one_line(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(line.split())
    assert stop.value.code == 2
    assert re.fullmatch(rf"error: {words}\n", capsys.readouterr().err)
