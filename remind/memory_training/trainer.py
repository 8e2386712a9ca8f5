"""GRPO over memory episodes: TRL's `GRPOTrainer` generates, we say what an episode is and what is minimised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from remind.core import optional
from remind.core.errors import ModelError
from remind.memory_training.episodes import Episode, Prompt, Scores, Task, Trace
from remind.memory_training.objective import (
    Weighting,
    advantages,
    contrastive_loss,
    grpo_loss,
    k3,
    mean_logp,
)
from remind.memory_training.packing import Packed, can_pack, pack, packed_logp

trl = optional("trl", "reinforcement learning")
#: Largest difference in log-probability that the reference may have from the policy before the first step.
SAME = 1e-3


@dataclass(frozen=True)
class Settings:
    """What the loss needs beside TRL's arguments."""

    clip: float = 0.2
    weighting: Weighting = "advantage"
    scale_rewards: bool = True
    contrast: Mapping[str, float] = field(default_factory=dict)
    contrast_scale: float = 0.15
    kl_stop: float | None = None


@dataclass(frozen=True)
class Chunk:
    """Whole groups of one generation, padded: what one forward and backward pass takes.

    Attributes:
        real: [B], 0 at the stand-in of a chunk without traces.
        pairs: (role, gap, rows of the winner, rows of the loser).
        total: real traces of the generation, over all processes.
        groups: groups of the generation, over all processes.
        packed: the same traces with each prompt once; None: the model cannot take them so, or no prompt is shared.
    """

    prompt: Tensor
    prompt_mask: Tensor
    completion: Tensor
    mask: Tensor
    advantage: Tensor
    weight: Tensor
    real: Tensor
    roles: tuple[str, ...]
    pairs: tuple[tuple[str, float, Tensor, Tensor], ...]
    total: float
    groups: int
    old: Tensor | None = None
    ref: Tensor | None = None
    packed: Packed | None = None


def grpo_arguments(out: str, seed: int, **changes: Any) -> Any:
    """`GRPOConfig` with the defaults that matter here set, whatever TRL's are; nothing is reported or saved."""
    settings: dict[str, Any] = {
        "output_dir": out,
        "seed": seed,
        "report_to": [],
        "save_strategy": "no",
        "bf16": False,
        "gradient_checkpointing": False,
        "use_bias_correction_kl": False,
        "loss_type": "grpo",
        "shuffle_dataset": False,
        "remove_unused_columns": False,
        "disable_dropout": True,
        "disable_tqdm": True,
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
    }
    return trl.GRPOConfig(**settings | changes)


class MemoryGRPOTrainer(trl.GRPOTrainer):  # type: ignore[misc, name-defined]
    """TRL's trainer for episodes of several prompts (MemBuilder's ADRPO, SaliMory).

    To TRL a micro-batch is one row: `_generate_and_score_completions` returns a list of chunks, each with whole groups,
    so that neither shuffling nor splitting tears a group or drops a trace. Everything sampled follows from the seed and
    the number of the generation, so that a resumed run needs no state of generators.
    """

    def __init__(
        self,
        task: Task,
        rows: Sequence[int],
        settings: Settings,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        args: Any,
        first: int = 0,
        callbacks: Sequence[TrainerCallback] = (),
        optimizers: tuple[Any, Any] = (None, None),
    ) -> None:
        """See `trl.GRPOTrainer`.

        Args:
            rows: rows of the task in the order of training, those that are still to come.
            model: the policy, loaded from a folder: with `args.beta` TRL reads the reference from there again.
            first: number of the first generation; above 0 in a resumed run.
        """
        if args.gradient_accumulation_steps != args.steps_per_generation:
            raise ModelError("a generation is one optimiser step (or num_iterations): steps_per_generation differs")
        if args.per_device_train_batch_size % args.num_generations:
            raise ModelError(f"a micro-batch holds whole groups of {args.num_generations} rollouts")
        from datasets import Dataset  # comes with trl

        self.task, self.settings, self.first = task, settings, first
        self._kl: list[Tensor] = []
        self._stopped = False
        super().__init__(
            model=model,
            reward_funcs=[_by_task],
            args=args,
            train_dataset=Dataset.from_dict({"prompt": [""] * len(rows), "row": list(rows)}),
            processing_class=tokenizer,
            callbacks=[*callbacks, _StopOnKL(self)],
            optimizers=optimizers,
        )

    def _send_telemetry(self) -> None:
        """TRL would tell its makers that a trainer was built."""

    # rollouts

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        args, size = self.args, self.args.num_generations
        generation = self.first + self._step // (args.steps_per_generation * args.num_iterations)
        torch.manual_seed((args.seed * 1_000_003 + generation) * 1009 + self.accelerator.process_index)
        self._stopped = False
        rows = [int(row["row"]) for row in inputs[::size]]
        outcomes, traces = self._lockstep([self.task.episode(row) for row in rows for _ in range(size)])
        scores = [self.task.score(row, outcomes[n * size : (n + 1) * size]) for n, row in enumerate(rows)]
        self._record(scores, traces)
        counts = torch.tensor([sum(map(len, traces)), len(rows)], device=self.accelerator.device)
        total, groups = self.accelerator.reduce(counts, "sum").tolist()
        share = args.per_device_train_batch_size // size
        chunks = [
            self._with_references(
                self._chunk(scores[n : n + share], traces[n * size : (n + share) * size], total, groups),
                check=generation == 0,
            )
            for n in range(0, len(rows), share)
        ]
        return {"index": torch.arange(len(chunks)), "chunk": chunks}

    def _lockstep(self, episodes: list[Episode]) -> tuple[list[Any], list[list[Trace]]]:
        """Run episodes side by side: in each round all that are open are answered in one batch."""
        outcomes: list[Any] = [None] * len(episodes)
        traces: list[list[Trace]] = [[] for _ in episodes]
        asked: dict[int, list[Prompt]] = {}

        def advance(n: int, replies: list[list[int]] | None) -> None:
            try:
                asked[n] = next(episodes[n]) if replies is None else episodes[n].send(replies)
            except StopIteration as end:
                asked.pop(n, None)
                outcomes[n] = end.value

        for n in range(len(episodes)):
            advance(n, None)
        while most := self._most(sum(map(len, asked.values()))):
            prompts = [prompt for n in asked for prompt in asked[n]]
            # every process asks equally many, however few episodes of its own are open
            ids = [p.ids for p in prompts] + [[self._tokenizer.eos_token_id]] * (most - len(prompts))
            replies = iter(self._generate_single_turn(ids, None, {}, 1)[0])
            for n, own in list(asked.items()):
                answers = list(islice(replies, len(own)))
                traces[n] += [Trace(p.role, p.ids, reply) for p, reply in zip(own, answers, strict=True)]
                advance(n, answers)
        return outcomes, traces

    def _most(self, count: int) -> int:
        """The largest count of any process."""
        return int(self.accelerator.gather(torch.tensor([count], device=self.accelerator.device)).max())

    def _record(self, scores: Sequence[Scores], traces: Sequence[Sequence[Trace]]) -> None:
        log = self._metrics["train"]
        for name in sorted({name for score in scores for name in score.metrics}):
            values = [score.metrics[name] for score in scores if name in score.metrics]
            log[name].append(sum(values) / len(values))
        rewards = [list(values) for score in scores for values in score.rewards.values()]
        flat = [value for values in rewards for value in values if value == value]
        log["reward"].append(sum(flat) / max(len(flat), 1))
        log["groups_without_signal"].append(sum(not any(advantages(v)) for v in rewards) / max(len(rewards), 1))
        lengths = [len(trace.completion) for group in traces for trace in group]
        log["completion_length"].append(sum(lengths) / max(len(lengths), 1))

    # tensors

    def _chunk(self, scores: Sequence[Scores], traces: list[list[Trace]], total: int, groups: int) -> Chunk:
        rows: list[tuple[Trace, float, float]] = []
        pairs: list[tuple[str, float, Tensor, Tensor]] = []
        device = self.accelerator.device
        for score, group in zip(scores, _groups(traces, self.args.num_generations), strict=True):
            by_role = {role: advantages(r, self.settings.scale_rewards) for role, r in score.rewards.items()}
            places: dict[tuple[str, int], list[int]] = {}
            for n, rollout in enumerate(group):
                for trace in rollout:
                    weight = score.weights[trace.role][n] if trace.role in score.weights else 1.0
                    places.setdefault((trace.role, n), []).append(len(rows))
                    rows.append((trace, by_role[trace.role][n], weight))
            for pair in score.pairs:
                winner, loser = (places.get((pair.role, n), []) for n in (pair.winner, pair.loser))
                if winner and loser:
                    ends = torch.tensor(winner, device=device), torch.tensor(loser, device=device)
                    pairs.append((pair.role, pair.gap, *ends))
        real = torch.ones(len(rows), device=device)
        if not rows:  # every process makes equally many passes
            eos = [self._tokenizer.eos_token_id]
            rows, real = [(Trace("", eos, eos), 0.0, 1.0)], torch.zeros(1, device=device)
        prompt, prompt_mask = self._padded([trace.prompt for trace, *_ in rows], "left")
        completion, mask = self._padded([trace.completion for trace, *_ in rows], "right")
        packed = None
        if can_pack(self.model.config):
            prompts, completions = zip(*((trace.prompt, trace.completion) for trace, *_ in rows), strict=True)
            packed = pack(prompts, completions, self._tokenizer.pad_token_id)
        return Chunk(
            prompt=prompt,
            prompt_mask=prompt_mask,
            completion=completion,
            mask=mask,
            advantage=torch.tensor([advantage for _, advantage, _ in rows], device=device),
            weight=torch.tensor([weight for *_, weight in rows], device=device),
            real=real,
            roles=tuple(trace.role for trace, *_ in rows),
            pairs=tuple(pairs),
            total=max(total, 1),
            groups=max(groups, 1),
            packed=packed and packed.to(device),
        )

    def _padded(self, rows: Sequence[Sequence[int]], side: str) -> tuple[Tensor, Tensor]:
        """Token ids and mask, [B, longest]."""
        width = max(1, *map(len, rows))
        ids = torch.full((len(rows), width), self._tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for n, row in enumerate(rows):
            place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
            ids[n, place], mask[n, place] = torch.tensor(row, dtype=torch.long), 1
        return ids.to(self.accelerator.device), mask.to(self.accelerator.device)

    def _logp(self, model: Any, chunk: Chunk) -> Tensor:
        """Log-probabilities of the completions at the temperature of sampling, [B, T]."""
        if chunk.packed is not None:
            with self.accelerator.autocast():
                return packed_logp(model, chunk.packed) * chunk.mask
        ids = torch.cat([chunk.prompt, chunk.completion], 1)
        mask = torch.cat([chunk.prompt_mask, chunk.mask], 1)
        logp: Tensor = self._get_per_token_logps_and_entropies(model, ids, mask, chunk.completion.shape[1])[0]
        return logp

    @torch.no_grad()
    def _with_references(self, chunk: Chunk, check: bool) -> Chunk:
        """Add what the policy that sampled and the reference think of the traces, where the loss needs it.

        Raises:
            ModelError: before the first step the reference is another model than the policy.
        """
        old = ref = None
        if self.args.num_iterations > 1 or check:
            old = self._logp(self.model, chunk)
        if self.beta:
            if self.ref_model is None:
                with self.accelerator.unwrap_model(self.model).disable_adapter():
                    ref = self._logp(self.model, chunk)
            else:
                ref = self._logp(self.ref_model, chunk)
            if check and old is not None and float(((old - ref) * chunk.mask).abs().max()) > SAME:
                name = self.model.config._name_or_path
                raise ModelError(f"{name}: the reference is not the policy training begins with; save the policy there")
        return Chunk(**{**vars(chunk), "old": old if self.args.num_iterations > 1 else None, "ref": ref})

    # loss

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """SaliMory's Eq. 6, MemBuilder's Eq. 12 with the sum over roles as a mean over traces."""
        (chunk,) = inputs["chunk"]
        logp = self._logp(model, chunk)
        old = logp.detach() if chunk.old is None else chunk.old
        traces = grpo_loss(
            logp,
            old,
            chunk.ref,
            chunk.mask,
            chunk.advantage,
            chunk.weight,
            self.settings.clip,
            self.beta,
            self.settings.weighting,
        )
        loss = (traces * chunk.real).sum() / chunk.total
        for role, gap, winner, loser in chunk.pairs:
            ends = mean_logp(logp, chunk.mask, winner), mean_logp(logp, chunk.mask, loser)
            term = contrastive_loss(*ends, gap, self.settings.contrast_scale) / chunk.groups
            loss = loss + self.settings.contrast.get(role, 0.0) * term
            self._metrics["train"][f"contrast/{role}"].append(float(term.detach()) * chunk.groups)
        with torch.no_grad():
            counted = chunk.mask * chunk.real[:, None]
            # of the policy that sampled to the present one: the roles of k3's arguments are swapped
            self._kl.append(torch.stack([(k3(old, logp) * counted).sum(), counted.sum()]).detach())
            if chunk.ref is not None:
                self._metrics["train"]["kl"].append(
                    float((k3(logp, chunk.ref) * counted).sum() / counted.sum().clamp(min=1))
                )
        # processes average their gradients
        return loss * self.accelerator.num_processes

    def step_divergence(self) -> float:
        """KL(π_old ‖ π_θ), nats a token, over the passes since the last call; over all processes."""
        sums = self.accelerator.reduce(torch.stack(self._kl).sum(0), "sum")
        self._kl.clear()
        return float(sums[0] / sums[1].clamp(min=1))


def _by_task(**_: Any) -> list[float]:
    """TRL wants a reward function; the task scores whole groups instead."""
    raise AssertionError


def _groups(items: list[list[Trace]], size: int) -> list[list[list[Trace]]]:
    return [items[n : n + size] for n in range(0, len(items), size)]


class _StopOnKL(TrainerCallback):  # type: ignore[misc]
    """Ends the updates of a generation where the policy has moved too far (SaliMory, Appendix B.2).

    TRL's loop over a generation cannot be left; without gradients its remaining steps change nothing.
    """

    def __init__(self, trainer: MemoryGRPOTrainer) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, limit = self.trainer, self.trainer.settings.kl_stop
        divergence = trainer.step_divergence()
        if limit is None:
            return
        trainer._metrics["train"]["kl_step"].append(divergence)
        trainer._stopped = trainer._stopped or divergence > limit
        if trainer._stopped:
            trainer.model.zero_grad(set_to_none=True)
