"""One run: train with the trainer, in this process, and answer the questions of dev or test with the trained model.

Its cost are floating-point operations counted from the tokens that each level really runs.
"""

from __future__ import annotations

import contextlib
import gc
import io
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from experiments.proof.states import split_records, training_records
from experiments.proof.store import RunStore, Spec
from remind.alignment.arguments import PRAConfig
from remind.alignment.config import Objective
from remind.alignment.examples import Example
from remind.alignment.metrics import read_metrics
from remind.alignment.step import Pass, common_prefix, head_of
from remind.alignment.trainer import PRATrainer
from remind.core.errors import ModelError
from remind.core.files import write_json
from remind.models.backbone import Backbone, load_backbone
from remind.models.generate import generate
from remind.states.pyramid import LEVELS
from remind.states.records import StateRecord
from remind.testbed.accuracy import correct_answers
from remind.testbed.built import Marks

#: Right (1) or wrong (0) for each question, by level.
Answers = dict[str, str]
_KEPT = ("step", "total", "hard", "lr", "grad_norm")
_KEPT_BEGINNINGS = ("share_", "jsd", "dist", "ce", "entropy")


class Runner:
    """Performs runs one after the other; keeps the untrained model, and the states of the last training world."""

    def __init__(self, store: RunStore) -> None:
        self.store, self.config = store, store.config
        self.base = load_backbone(store.model, device="cpu")
        self.work = tempfile.TemporaryDirectory(prefix="remind-proof-")
        self._questions: dict[tuple[str, Marks | None], list[StateRecord]] = {}
        self._learned: tuple[str, list[StateRecord], set[str]] = ("", [], set())

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.work.cleanup()

    def perform(self, spec: Spec) -> None:
        """Do a run and write its result, unless it is there.

        Raises:
            DataError, ConfigError, ModelError: as the trainer does, but for numbers that are not finite: then the
                state before them is measured, and the result says so under `stopped`.
        """
        if self.store.done(spec):
            return
        began = perf_counter()
        result = self._train(spec) if spec.steps else {"right": self._answer(self.base, spec), "flops": 0.0}
        seconds = {"all": perf_counter() - began}
        write_json(self.store.path(spec), {"spec": asdict(spec), **result, "seconds": seconds})

    def _answer(self, backbone: Backbone, spec: Spec) -> Answers:
        """Under x1 and x2 the first `upper` questions alone, but for the untrained model."""
        key = (spec.on, spec.condition.marks)
        if key not in self._questions:
            self._questions[key] = split_records(self.store, spec.on, *self.config.dialogues(spec.on), key[1])
        records, answers = self._questions[key], {}
        for level in LEVELS:
            some = records[: self.config.upper] if spec.steps and level != "x0" else records
            hits = correct_answers(backbone, some, level, self.config.max_new_tokens, self.config.answer_batch)
            answers[level] = "".join(str(int(hit)) for hit in hits)
        return answers

    def _train(self, spec: Spec) -> dict[str, Any]:
        records, pseudo_labelled = self._states(spec)
        split = {name: [record for record in records if record.split == name] for name in ("train", "dev")}

        out = Path(tempfile.mkdtemp(dir=self.work.name))
        # no bars and no lines: hundreds of runs would print the same
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            args = arguments(self.store, spec, out)
            trainer = PRATrainer(self.store.model, args, split["train"], split["dev"])
            stopped = fit(trainer)
        rows = read_metrics(out)
        kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in ("eval", "guard")}
        result = {
            "right": self._answer(replace(self.base, model=trainer.model), spec),
            "steps": trainer.state.global_step,
            "flops": self._flops(trainer, pseudo_labelled),
            "stopped": stopped,
            "guard": [{"step": row["step"], "what": row["what"]} for row in kinds["guard"]],
            "watched": [_short(row) for row in kinds["eval"]],
        }
        del trainer
        # models hang in circles with their hooks, and many runs share one process
        gc.collect()
        return result

    def _states(self, spec: Spec) -> tuple[list[StateRecord], set[str]]:
        """What a run learns from, made unless the last one had the same; and the questions with pseudo-labels."""
        key = self.store.states_key(spec)
        if key != self._learned[0]:
            records = training_records(self.store, spec.condition, spec.seed)
            pseudo = self._pseudo_labels(records) if spec.arm == "sft_pseudo" else {}
            records = [replace(r, target=pseudo.get(r.question_id, r.target)) for r in records]
            self._learned = (key, records, set(pseudo))
        return self._learned[1:]

    def _pseudo_labels(self, records: list[StateRecord]) -> dict[str, str | None]:
        """For each training question without a label the answer decoded from x2."""
        unlabelled = [record for record in records if record.target is None and record.split == "train"]
        prompts = [record.x2.text for record in unlabelled]
        answers = generate(self.base, prompts, self.config.max_new_tokens, self.config.answer_batch)
        return {r.question_id: a.text if a else None for r, a in zip(unlabelled, answers, strict=True)}

    def _flops(self, trainer: PRATrainer, pseudo_labelled: set[str]) -> float:
        size, objective, items = size_of(trainer.model), trainer.objective, trainer.train_dataset.items
        total = fixed_cost(items, objective, size)
        total += sum(size.forward(e.tokens_under([2]), len(e.answer)) for e in items if e.id in pseudo_labelled)
        # the order draws every question as often as any other
        passes = step_cost(items, objective, trainer._passes, size) / len(items)
        total += passes * self.config.batch * trainer.state.global_step
        return total


def arguments(store: RunStore, spec: Spec, out: Path) -> PRAConfig:
    """The run as the trainer takes it; it saves nothing, since the model is measured where it is."""
    config, objective = store.config, spec.knobs.objective
    return PRAConfig(
        str(out),
        **vars(objective),
        # an arm that learns from labels alone must not be given other answers
        unlabelled="x2" if objective.active else "skip",
        max_decoded=config.max_new_tokens,
        cache=str(out.parent / "cache"),
        learning_rate=spec.knobs.lr,
        max_steps=spec.steps,
        batch_size=config.batch,
        eval_steps=config.watch_every,
        save_strategy="no",
        metric_for_best_model=None,
        seed=spec.seed,
    )


def fit(trainer: PRATrainer) -> str | None:
    """Train; returns why it ended early, where numbers were not finite. Other errors are raised."""
    try:
        trainer.train()
    except ModelError as error:
        if "not finite" not in str(error):
            raise
        return str(error).split(";")[0]
    return None


def _short(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in row.items()
        if name in _KEPT or name.startswith(_KEPT_BEGINNINGS)
    }


# what a run costs

_FORWARD, _BACKWARD = 2, 4


@dataclass(frozen=True)
class Size:
    """Parameters that multiply.

    Attributes:
        body: of the language model, without its embedding; each once per token.
        head: each once per answer position.
    """

    body: int
    head: int

    def forward(self, tokens: int, answer: int) -> float:
        """Operations of one forward pass; those of attention between tokens and of padding are left out."""
        return float(_FORWARD * (tokens * self.body + answer * self.head))

    def backward(self, tokens: int, answer: int) -> float:
        return float(_BACKWARD * (tokens * self.body + answer * self.head))


def size_of(model: Any) -> Size:
    """The size of a language model, as it is trained."""
    embedding = model.get_input_embeddings().weight
    body = sum(parameter.numel() for parameter in model.get_decoder().parameters() if parameter is not embedding)
    return Size(body, head_of(model).weight.numel())


def step_cost(examples: Sequence[Example], objective: Objective, passes: Sequence[Pass], size: Size) -> float:
    """Operations of one optimiser step over `examples`; teachers that are running averages are run in each step."""
    total = 0.0
    for example in examples:
        answer = len(example.answer)
        common = common_prefix(example.prompts[1], example.prompts[2])
        for step in passes:
            for level in step.levels:
                tokens = example.tokens_under([level]) - (common if step.shared and level == 2 else 0)
                total += size.forward(tokens, answer)
                if step.backward and level in objective.trained:
                    total += size.backward(tokens, answer)
        if objective.teacher_model_kind == "ema":
            tokens = example.tokens_under(objective.taught)
            both = {1, 2} <= objective.taught and any(step.shared for step in passes)
            total += size.forward(tokens - common * both, answer * len(objective.taught))
    return total


def fixed_cost(examples: Sequence[Example], objective: Objective, size: Size) -> float:
    """Operations before the first step: targets of the base model, and answers decoded under x2 where there are none.

    Both count in full, although runs may share what they leave on disk.
    """
    total = 0.0
    for example in examples:
        answer = len(example.answer)
        if objective.teacher_model_kind == "base":
            total += size.forward(example.tokens_under(objective.taught), answer * len(objective.taught))
        if not example.labelled:
            total += size.forward(example.tokens_under([2]), answer)
    return total
