"""Trainers of policies: imitation of an expert's replies (SFT), and GRPO over episodes of several prompts.

Both are a `transformers.Trainer` with the checkpoints, signals and metrics of `PRATrainer`. A group of rollouts is
sampled, scored and trained on as a whole, and everything sampled follows from the seed and the number of the
generation, so that a resumed run needs no state of generators.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from itertools import count, islice
from math import ceil
from pathlib import Path
from random import Random
from statistics import fmean
from time import perf_counter
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object, send_to_device
from torch import Tensor, nn
from transformers import PrinterCallback, TrainingArguments

from remind.alignment.trainer import RunTrainer
from remind.core import optional
from remind.core.errors import ConfigError, DataError
from remind.core.progress import ProgressBar
from remind.core.run_folder import RunFolder, as_dict, flatten
from remind.memory_training import objective
from remind.memory_training.config import TrainMemoryConfig
from remind.memory_training.episodes import Prompt, Scores, together
from remind.memory_training.pico import complete, sampling, speech_of
from remind.models.backbone import Backbone
from remind.models.chat import end_token_id

#: Methods of reinforcement learning.
RL = ("adrpo", "salimory")
#: Settings that may change when a run is resumed.
FREE = frozenset({"out", "resume", "save_every", "rl.micro_groups", "world.evaluate", "llm.cache"})


def arguments(cfg: TrainMemoryConfig) -> TrainingArguments:
    """The settings as transformers has them; a step is one of the optimiser.

    Raises:
        ConfigError: a batch that the processes cannot share.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    updates, size = (cfg.rl.inner_epochs, cfg.rl.micro_groups) if cfg.method in RL else (1, cfg.batch_size // processes)
    if not size or cfg.batch_size % (size * processes):
        raise ConfigError(f"batch_size {cfg.batch_size} is not a multiple of {size or 1} x {processes} processes")
    args = TrainingArguments(
        cfg.out,
        seed=cfg.seed,
        max_steps=cfg.steps * updates,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=cfg.batch_size // (size * processes),
        train_sampling_strategy="sequential",
        learning_rate=cfg.lr,
        lr_scheduler_type="cosine" if cfg.schedule == "cosine" else "constant_with_warmup",
        warmup_steps=ceil(cfg.warmup * cfg.steps * updates),
        optim="adamw_torch",
        max_grad_norm=cfg.max_grad_norm,
        gradient_checkpointing=cfg.gradient_checkpointing or None,
        save_strategy="steps",
        save_steps=cfg.save_every * updates,
        save_total_limit=1,
        disable_tqdm=True,
        # without it, processes on a machine without a GPU would each train alone
        use_cpu=torch.accelerator.current_accelerator(check_available=True) is None,
        ddp_find_unused_parameters=False,
    )
    args._n_gpu = min(args._n_gpu, 1)  # one process trains on one GPU
    return args


class PolicyTrainer(RunTrainer):
    """Imitation: the next tokens of replies, in the mean over all of their tokens.

    Args:
        policy: as it is trained.
        material: prompts and what follows, as token ids.
        args: of `arguments`.

    Raises:
        DataError: there is nothing to train on.
    """

    temperature = 1.0

    def __init__(self, policy: Backbone, material: Any, cfg: TrainMemoryConfig, args: TrainingArguments) -> None:
        if not (there := len(material)):
            raise DataError("there is nothing to train on: no reply of the expert could be used, or no question")
        self.cfg, self.material, self.updates = cfg, material, args.max_steps // cfg.steps
        needed, epochs = cfg.steps * cfg.batch_size, range(-(-cfg.steps * cfg.batch_size // there))
        order = [row for epoch in epochs for row in Random(f"order {cfg.seed} {epoch}").sample(range(there), there)]
        steps = [order[start : start + cfg.batch_size] for start in range(0, needed, cfg.batch_size)]
        # the optimiser's steps on a generation read the same rows
        rows: Any = [row for step in steps for _ in range(self.updates) for row in step]
        tokenizer = policy.tokenizer
        super().__init__(policy.model, args, data_collator=list, train_dataset=rows, processing_class=tokenizer)
        self.remove_callback(PrinterCallback)
        self.pad, self.end = tokenizer.pad_token_id, end_token_id(tokenizer)
        #: Of the step under way, from all its passes: values by name.
        self._seen: dict[str, list[float]] = defaultdict(list)
        self._clock = perf_counter()
        #: Numbers of replies of chat models.
        self._replies = count(1)

    def _settings(self) -> dict[str, Any]:
        free = FREE | ({"steps"} if self.cfg.schedule == "constant" and not self.cfg.warmup else set())
        return {name: value for name, value in flatten(as_dict(self.cfg)).items() if name not in free}

    def _begin(self, start: Path | None) -> None:
        done = int(start.name.rpartition("-")[2]) if start else 0
        self.bar = ProgressBar("train-memory", self.args.max_steps, done)
        if self.is_world_process_zero():
            RunFolder(self.args.output_dir).write(self.cfg)

    def replied(self) -> None:
        """Show that a chat model has replied: a step may wait for hundreds of replies."""
        self.bar.step(0, note=f"{next(self._replies)} requests")

    def _module(self, model: nn.Module) -> nn.Module:
        return objective.PolicyModel(model, self.temperature)

    def chunks(self, batches: list[list[int]]) -> Sequence[Any]:
        """What each pass of a step trains on, from its rows: of as many steps as read the same."""
        rows = [[self.material[row] for row in batch] for batch in batches]
        (tokens,) = self.summed(sum(len(reply) for batch in rows for _, reply in batch))
        return [(self.packed(*zip(*batch, strict=True)), tokens) for batch in rows]

    def loss(self, model: Any, chunk: Any) -> Tensor:
        """The share of a pass in the mean over all passes and processes, []."""
        packed, tokens = chunk
        return -model(packed).sum() / tokens

    def packed(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> Any:
        """`objective.Packed` on the device."""
        share = objective.can_share(self.model.config)
        return send_to_device(objective.pack(prompts, completions, self.pad, share), self.args.device)

    def summed(self, *numbers: float) -> list[float]:
        """Over all processes."""
        return [sum(column) for column in zip(*gather_object([numbers]), strict=True)]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[Any, None]:
        """The passes of a step."""
        batches = list(islice(epoch_iterator, num_batches))
        if self.state.global_step % self.updates == 0:
            self._chunks = self.chunks(batches)
        return self._chunks, None

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one pass."""
        model.train()
        loss = self.loss(model, inputs) * self.accelerator.num_processes  # gradients are averaged over processes
        self.accelerator.backward(loss)
        self._seen["loss"].append(float(loss.detach()) / self.accelerator.num_processes)
        if self.accelerator.sync_gradients:
            self._end_step()
        return loss.detach()

    def _end_step(self) -> None:
        """The row of metrics of a step. A signal that any process was sent ends the run behind a generation."""
        step = self.state.global_step + 1
        found = gather_object([(self._signals.requested, dict(self._seen))])
        if step % self.updates == 0:
            self._stop = max(signal for signal, _ in found)
        seen = {name: [v for _, own in found for v in own.get(name, ())] for name in {n for _, o in found for n in o}}
        self._seen.clear()
        now, before, self._clock = perf_counter(), self._clock, perf_counter()
        figures = {"loss": sum(seen.pop("loss")), **self._figures(seen), "learning_rate": self._get_learning_rate()}
        self._rows.append({"step": step, "kind": "train", **figures, "seconds": now - before})
        self.bar.step(note=f"loss {figures['loss']:.3f}")

    def _figures(self, seen: dict[str, list[float]]) -> dict[str, float]:
        return {name: fmean(seen[name]) for name in sorted(seen) if seen[name]}


#: Of each rollout of a group the traces.
Group = Sequence[Sequence[tuple[Prompt, list[int]]]]


class Chunk(NamedTuple):
    """Whole groups of one generation: what one forward and backward pass takes, B traces.

    Attributes:
        advantage, weight: [B].
        pairs: (role, gap, rows of the winner, rows of the loser).
        total, groups: traces and groups of the generation, over all processes.
        old, ref: [B, T] log-probabilities under the policy that sampled and the reference, where the loss needs them.
    """

    packed: objective.Packed
    advantage: Tensor
    weight: Tensor
    pairs: tuple[tuple[str, float, Tensor, Tensor], ...]
    total: float
    groups: float
    old: Tensor | None
    ref: Tensor | None


class EpisodeTrainer(PolicyTrainer):
    """GRPO over the episodes of a task (MemBuilder's ADRPO, SaliMory); `inner_epochs` steps on each generation.

    Raises:
        ModelError: vLLM is to sample, and TRL is missing.
    """

    def __init__(self, policy: Backbone, material: Any, cfg: TrainMemoryConfig, args: TrainingArguments) -> None:
        super().__init__(policy, material, cfg, args)
        rl = cfg.rl
        room, self.temperature = rl.reply_tokens or speech_of(policy.tokenizer).room, rl.temperature
        self.reference: nn.Module | None = None
        if rl.beta and cfg.lora is None:
            self.reference = self._module(deepcopy(self.model)).requires_grad_(False)
        self.decoding = sampling(policy, room, rl.temperature)
        self.vllm: Any = None
        self._synced, self._stopped = -1, False
        if rl.vllm != "off":
            # it copies the weights to vLLM's workers or server, adapters merged
            self.vllm = optional("trl.generation.vllm_generation", f"rl.vllm {rl.vllm}").VLLMGeneration(
                self.model,
                self.accelerator,
                policy.tokenizer,
                mode=rl.vllm,
                server_base_url=rl.vllm_server,
                gpu_memory_utilization=rl.vllm_memory,
                temperature=rl.temperature,
                max_completion_length=room,
            )

    # rollouts

    def chunks(self, batches: list[list[int]]) -> list[Chunk]:
        """Sample and score a generation."""
        size, process = self.cfg.rl.group, self.accelerator.process_index
        generation = self.state.global_step // self.updates
        torch.manual_seed((self.cfg.seed * 1_000_003 + generation) * 1009 + process)
        self._stopped = False
        rows = [row for batch in batches for row in batch]
        made = together([self.material.episode(row) for row in rows for _ in range(size)], self._sample)
        while self._sample([]):  # processes with shorter episodes take part until the last has ended
            pass
        groups = [made[start : start + size] for start in range(0, len(made), size)]
        scores = [
            self.material.score(row, [outcome for outcome, _ in group]) for row, group in zip(rows, groups, strict=True)
        ]
        traces: list[Group] = [[own for _, own in group] for group in groups]
        self._note(scores, traces)
        total, count = self.summed(sum(len(own) for group in traces for own in group), len(rows))
        share = self.cfg.rl.micro_groups
        parts = [slice(start, start + share) for start in range(0, len(rows), share)]
        return [self._chunk(scores[part], traces[part], max(total, 1), count) for part in parts]

    def _sample(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Completions of prompts. Every process asks equally many: a server takes those of all together."""
        ids = [prompt.ids for prompt in prompts]
        ids += [[self.end]] * (max(gather_object([len(ids)])) - len(ids))
        if self.vllm is None:
            with self.accelerator.autocast():
                return complete(self.model, ids, self.decoding) if ids else []
        if ids and self._synced != self.state.global_step:
            self.vllm.sync_weights()
            self._synced = self.state.global_step
        completions: list[list[int]] = self.vllm.generate(ids, None, 1)[1] if ids else []
        return completions

    def _note(self, scores: Sequence[Scores], groups: Sequence[Group]) -> None:
        for score in scores:
            for name, value in score.metrics.items():
                self._seen[name].append(value)
            for rewards in score.rewards.values():
                self._seen["reward"] += [value for value in rewards if value == value]
                self._seen["groups_without_signal"].append(not any(objective.advantages(rewards)))
        self._seen["completion_length"] += [len(reply) for group in groups for own in group for _, reply in own]

    def _chunk(self, scores: Sequence[Scores], groups: Sequence[Group], total: float, count: float) -> Chunk:
        rows: list[tuple[Prompt, list[int], float, float]] = []
        pairs: list[tuple[str, float, Tensor, Tensor]] = []
        device = self.accelerator.device
        for score, group in zip(scores, groups, strict=True):
            by_role = {role: objective.advantages(r) for role, r in score.rewards.items()}
            places: dict[tuple[str, int], list[int]] = defaultdict(list)
            for n, rollout in enumerate(group):
                for prompt, reply in rollout:
                    weight = score.weights[prompt.role][n] if prompt.role in score.weights else 1.0
                    places[prompt.role, n].append(len(rows))
                    rows.append((prompt, reply, by_role[prompt.role][n], weight))
            for pair in score.pairs:
                winner, loser = (places[pair.role, n] for n in (pair.winner, pair.loser))
                if winner and loser:
                    ends = torch.tensor(winner, device=device), torch.tensor(loser, device=device)
                    pairs.append((pair.role, pair.gap, *ends))
        # every process makes equally many passes
        prompts, replies, *numbers = zip(*(rows or [(Prompt("", [self.end, self.end]), [], 0.0, 1.0)]), strict=True)
        packed = self.packed([prompt.ids for prompt in prompts], replies)
        advantage, weights = torch.tensor(numbers, device=device)
        old = ref = None
        with torch.no_grad(), self.accelerator.autocast():
            if self.updates > 1:
                old = self._wrapped(packed)
            if self.cfg.rl.beta:
                with nullcontext() if self.reference else self.model.disable_adapter():
                    ref = (self.reference or self._wrapped)(packed)
        return Chunk(packed, advantage, weights, tuple(pairs), total, count, old, ref)

    # loss

    def loss(self, model: Any, chunk: Chunk) -> Tensor:
        """SaliMory's Eq. 6, MemBuilder's Eq. 12 with the sum over roles as a mean over traces."""
        rl, sali, mask = self.cfg.rl, self.cfg.salimory, chunk.packed.mask
        logp = model(chunk.packed)
        old = logp.detach() if chunk.old is None else chunk.old
        given = old, chunk.ref, mask, chunk.advantage, chunk.weight
        traces = objective.grpo_loss(logp, *given, rl.clip, rl.beta, rl.weighting)
        loss = traces.sum() / chunk.total
        for role, gap, winner, loser in chunk.pairs:
            term = objective.contrastive_loss(logp, mask, winner, loser, gap)
            self._seen[f"contrast/{role}"].append(float(term.detach()))
            loss = loss + {"booster": sali.boost, "utilizer": sali.utilize}.get(role, 0.0) * term / chunk.groups
        tokens, now = float(mask.sum()), logp.detach()
        # of the policy that sampled to the present one: the roles of k3's arguments are swapped
        self._seen["moved"].append(float((objective.k3(old, now) * mask).sum()))
        self._seen["tokens"].append(tokens)
        if chunk.ref is not None:
            self._seen["kl"].append(float((objective.k3(now, chunk.ref) * mask).sum()) / max(tokens, 1))
        return loss

    def _figures(self, seen: dict[str, list[float]]) -> dict[str, float]:
        """Beyond `kl_stop` the updates of a generation end (SaliMory, Appendix B.2): without gradients its remaining
        steps change nothing."""
        moved, limit = sum(seen.pop("moved")) / max(sum(seen.pop("tokens")), 1), self.cfg.rl.kl_stop
        if limit is not None:
            seen["kl_step"] = [moved]
            self._stopped = self._stopped or moved > limit
        if self._stopped:
            self.model.zero_grad(set_to_none=True)
        return super()._figures(seen)
