"""Settings of an evaluation and of a comparison, and the conditions that there are. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from remind.core.errors import ConfigError
from remind.llm.endpoints import LLMConfig
from sae.ranges import PositiveInt, PositiveShare, Resamples, Seed, check_ranges


class Condition(NamedTuple):
    """What a condition shows the model.

    Attributes:
        title: in words, for the report.
        corpus: whether it needs the dialogue files besides the states.
        asks: whether a model answers; False: a control whose answer is fixed.
    """

    title: str
    corpus: bool = False
    asks: bool = True


CONDITIONS = {
    "no_context": Condition("no conversation at all"),
    "full_context": Condition("the whole conversation, cut at a cap", corpus=True),
    "full_context_strategy": Condition("the whole conversation, cut at a cap, with x0's strategy", corpus=True),
    "oracle": Condition("gold evidence in place of what was retrieved, with strategy", corpus=True),
    "rag": Condition("fixed chunks closest to the question", corpus=True),
    "rag_strategy": Condition("fixed chunks closest to the question, with x0's strategy", corpus=True),
    "evidence": Condition("retrieved evidence alone"),
    "x0": Condition("evidence + strategy"),
    "x1": Condition("evidence + strategy + markers"),
    "x2": Condition("evidence + strategy + markers + summary"),
    "altered": Condition("summary made from x0, markers put after it", corpus=True),
    "always_a": Condition("control: option A whatever is asked", asks=False),
    "most_frequent": Condition("control: the most frequent answer of the training split", asks=False),
    "abstain": Condition("control: no answer ever", asks=False),
}
#: Conditions whose answers are fixed.
CONTROLS = tuple(name for name, one in CONDITIONS.items() if not one.asks)
#: layers: Figure 4 (d). ladder: Figure 4 (a) to (c).
SETS = {
    "layers": ("x0", "x1", "x2"),
    "ladder": ("no_context", "evidence", "x0", "x1", "x2", "altered"),
    "baselines": ("no_context", "full_context", "full_context_strategy", "oracle", "rag", "rag_strategy", "x0"),
    "controls": CONTROLS,
    "all": tuple(CONDITIONS),
}


@dataclass
class ContextConfig:
    """What the conditions show that are built from the dialogue files. Tokens are of the sentence encoder."""

    full_tokens: PositiveInt = 30000
    """full_context: limit for the dialogue; the oldest turns beyond it are cut whole, and counted."""
    chunk_tokens: PositiveInt = 200
    """rag: length of a chunk, in whole turns of one session; together they fill the room of x0's dialogue. MiniLM reads
    254 tokens of a text."""
    memories: PositiveInt = 10
    """Memory systems: number of memories."""
    memory_tokens: PositiveInt | None = None
    """Memory systems: limit for the tokens of all memories together, in place of their number."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)


@dataclass
class VLLMConfig:
    """The engine of answers vllm."""

    max_model_len: PositiveInt | None = None
    """Limit for prompt and answer together, in tokens; None: the context of the model, which may not fit in the memory
    of one GPU."""
    tensor_parallel_size: PositiveInt = 1
    """Number of GPUs that the model is distributed over."""
    gpu_memory_utilization: PositiveShare = 0.9
    """Share of each GPU's memory that the engine takes."""
    at_once: PositiveInt = 256
    """Prompts sent to the engine at once; their answers are saved before the next ones are sent."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)


@dataclass
class EvaluateConfig:
    """Answer the questions of a split under one or more conditions, judge the answers, write the report."""

    states: str
    """Folder of states (from `remind build-states`)."""
    model: str
    """Model that answers: nano, smollm2, or a Hugging Face folder or id, such as an exported checkpoint. With answers
    server: a name for the report."""
    out: str
    """Folder for predictions.jsonl, report.json and report.html; several conditions have a folder each
    in it. A run that was stopped is resumed."""
    split: Literal["train", "dev", "test"] = "test"
    """Questions to answer."""
    level: Literal["x0", "x1", "x2"] = "x0"
    """The one condition, where conditions names none: a state to answer from. x0 is what inference sees."""
    conditions: list[str] = field(default_factory=list)
    """What to answer from, side by side: x0, x1, x2, evidence, altered, no_context, full_context, oracle, rag,
    always_a, most_frequent, abstain; full_context_strategy, rag_strategy: the same with the strategy of x0; or a set of
    them: layers, ladder, baselines, controls, all; or memory systems: dense, bm25, hybrid, mem0, ..."""
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of memory systems by name, as in run-memory."""
    answers: Literal["local", "server", "vllm", "none"] = "local"
    """local: the model answers here, in batches. server: the endpoint llm.answer does. vllm: as local, but vLLM runs
    the model. none: nobody does, so that contexts alone are measured."""
    max_new_tokens: PositiveInt = 512
    """Room for answer and explanation; an output that is cut off is scored as it stands, and counted."""
    batch_size: PositiveInt = 8
    """Prompts per forward, with answers local. Changes the speed, not the answers."""
    vllm: VLLMConfig = field(default_factory=VLLMConfig)
    """The engine of answers vllm, which takes its GPUs itself, whatever device says."""
    images: Literal["captions", "pixels"] | None = None
    """How prompts show images: by their captions, or as pixels in place of the caption wherever the image's file is
    known. None: as the model was trained, where its folder says so (training.json), else captions."""
    image_tokens: PositiveInt | None = None
    """At most about so many tokens for an image shown as pixels. None: as the model was trained, else 256."""
    image_root: str | None = None
    """Folder that the image files must lie in, links followed; None: they are read wherever the states say they lie."""
    limit: PositiveInt | None = None
    """At most this many questions, spread evenly over the split; for a quick look."""
    judge: Literal["offline", "llm", "longmemeval"] = "offline"
    """Judge of direct answers: offline, a rule; llm: the endpoint llm.judge; longmemeval: that endpoint, in one of five
    roles by LongMemEval's question types."""
    llm: LLMConfig = field(default_factory=LLMConfig)
    """Endpoints: answer (answers server), judge (judge llm), summary (condition altered)."""
    corpus: list[str] = field(default_factory=list)
    """Dialogue files that the states were built from; full_context, oracle, rag (with the strategy, too) and altered
    need them."""
    corpus_format: str | None = None
    """Format of those files, or the mapping file (.yaml) they were read by; None: recognised from the content."""
    context: ContextConfig = field(default_factory=ContextConfig)
    """What full_context and rag show."""
    encoder: str = "minilm"
    """Sentence encoder of text memory recall (Eq. 10), of rag, and of token caps."""
    bootstrap: Resamples = 1000
    """Resamples behind each interval that is not of a share."""
    seed: Seed = 0
    """Of the resampling; answers are greedy and need none."""
    device: str = "cpu"
    """Where the model runs, e.g. cpu or cuda:0. cuda: on the GPU of each process, where there are several."""
    dtype: str = "float32"
    """Precision of the model: float32, bfloat16, float16 or auto."""
    overwrite: bool = False
    """Drop what an earlier run left in out and start again."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)

    @property
    def names(self) -> tuple[str, ...]:
        """The conditions to evaluate, sets spelled out, each once, in the order given."""
        return tuple(dict.fromkeys(one for name in self.conditions or [self.level] for one in SETS.get(name, (name,))))


@dataclass
class CompareConfig:
    """Compare two runs of `remind evaluate` on the same questions, second less first: remind compare FIRST SECOND."""

    first: str
    """Folder of a run (report.json, predictions.jsonl); may also be given as the first plain argument."""
    second: str
    """Folder of the other run; may also be given as the second plain argument."""
    out: str | None = None
    """JSON file for the differences; None: they are only printed."""
    resamples: Resamples = 2000
    """Bootstrap resamples behind each interval and p-value."""
    seed: Seed = 0
    """Of the resampling."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
