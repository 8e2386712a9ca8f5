"""Trainers of policies: imitation of an expert's replies (SFT), and GRPO over episodes of several prompts, with
MemBuilder's weights (Eq. 11-12) and SaliMory's contrastive terms (Eq. 5-6).

Both are a `transformers.Trainer` with the checkpoints, signals and metrics of `PRATrainer`. A group of rollouts is
sampled, scored and trained on as a whole, and everything sampled follows from the seed and the number of the
generation, so that a resumed run needs no state of generators. Completions of the same prompt stand in one row, so
that a forward pass reads the prompt once and not once a rollout.
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
from typing import Any, Literal, NamedTuple

import torch
from accelerate.utils import gather_object, send_to_device
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus
from torch.utils.checkpoint import checkpoint
from transformers import PrinterCallback, TrainingArguments

from remind.alignment.objective import accumulation_dtype
from remind.alignment.step import body_of, head_of
from remind.alignment.trainer import RunTrainer
from remind.core import optional
from remind.core.errors import ConfigError, DataError
from remind.core.progress import ProgressBar
from remind.core.run_folder import RunFolder, as_dict, flatten
from remind.memory_training.config import TrainMemoryConfig
from remind.memory_training.episodes import Prompt, Scores, together
from remind.memory_training.pico import complete, sampling, speech_of
from remind.models.backbone import Backbone
from remind.models.chat import end_token_id

#: Methods of reinforcement learning.
RL = ("adrpo", "salimory")
#: Settings that may change when a run is resumed.
FREE = frozenset({"out", "resume", "save_every", "world.evaluate", "llm.cache"})
Weighting = Literal["advantage", "printed"]
#: Models of plain causal attention, which a mask and positions say all about.
KINDS = ("llama", "qwen2", "qwen3")
#: Logits that exist at once.
LOGITS = 2**26


def arguments(cfg: TrainMemoryConfig) -> TrainingArguments:
    """The settings as transformers has them; a step is one of the optimiser.

    Raises:
        ConfigError: a batch that the processes cannot share.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    # a group of rollouts at a time
    updates, size = (cfg.rl.inner_epochs, 1) if cfg.method in RL else (1, cfg.batch_size // processes)
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
        return PolicyModel(model, self.temperature)

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
        """`Packed` on the device."""
        share = can_share(self.model.config)
        return send_to_device(pack(prompts, completions, self.pad, share), self.args.device)

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
    """A group of one generation: what one forward and backward pass takes, B traces.

    Attributes:
        advantage, weight: [B].
        pairs: (role, gap, rows of the winner, rows of the loser).
        total, groups: traces and groups of the generation, over all processes.
        old, ref: [B, T] log-probabilities under the policy that sampled and the reference, where the loss needs them.
    """

    packed: Packed
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
        return [self._chunk(*both, max(total, 1), count) for both in zip(scores, traces, strict=True)]

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
                self._seen["groups_without_signal"].append(not any(advantages(rewards)))
        self._seen["completion_length"] += [len(reply) for group in groups for own in group for _, reply in own]

    def _chunk(self, score: Scores, group: Group, total: float, count: float) -> Chunk:
        rows: list[tuple[Prompt, list[int], float, float]] = []
        device = self.accelerator.device
        by_role = {role: advantages(r) for role, r in score.rewards.items()}
        places: dict[tuple[str, int], list[int]] = defaultdict(list)
        for n, rollout in enumerate(group):
            for prompt, reply in rollout:
                weight = score.weights[prompt.role][n] if prompt.role in score.weights else 1.0
                places[prompt.role, n].append(len(rows))
                rows.append((prompt, reply, by_role[prompt.role][n], weight))
        ends = ((pair, places[pair.role, pair.winner], places[pair.role, pair.loser]) for pair in score.pairs)
        pairs = [
            (pair.role, pair.gap, torch.tensor(winner, device=device), torch.tensor(loser, device=device))
            for pair, winner, loser in ends
            if winner and loser
        ]
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
        traces = grpo_loss(logp, *given, rl.clip, rl.beta, rl.weighting)
        loss = traces.sum() / chunk.total
        for role, gap, winner, loser in chunk.pairs:
            term = contrastive_loss(logp, mask, winner, loser, gap)
            self._seen[f"contrast/{role}"].append(float(term.detach()))
            loss = loss + {"booster": sali.boost, "utilizer": sali.utilize}.get(role, 0.0) * term / chunk.groups
        tokens, now = float(mask.sum()), logp.detach()
        # of the policy that sampled to the present one: the roles of k3's arguments are swapped
        self._seen["moved"].append(float((k3(old, now) * mask).sum()))
        self._seen["tokens"].append(tokens)
        if chunk.ref is not None:
            self._seen["kl"].append(float((k3(now, chunk.ref) * mask).sum()) / max(tokens, 1))
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


# losses


def advantages(rewards: Sequence[float], epsilon: float = 1e-4) -> list[float]:
    """Advantages of one group of rollouts: (r − mean) / (σ + ε) (MemBuilder, Eq. 11; σ with Bessel's correction).

    Args:
        rewards: one per rollout, two at least. A NaN is a reward that could not be had: the whole group then has
            advantage 0.

    Returns:
        One per rollout; all 0 where the rewards do not differ.
    """
    values = torch.tensor(rewards, dtype=torch.float64)
    if values.isnan().any() or (values == values[0]).all():
        return [0.0] * values.numel()
    return ((values - values.mean()) / (values.std() + epsilon)).tolist()  # type: ignore[no-any-return]


def k3(logp: Tensor, ref: Tensor) -> Tensor:
    """Estimate of KL(π_θ ‖ π_ref) from tokens of π_θ, never negative: exp(d) − d − 1, d = log π_ref − log π_θ."""
    difference = ref - logp
    return difference.exp() - difference - 1


def surrogate(ratio: Tensor, advantage: Tensor, weight: Tensor, clip: float, weighting: Weighting) -> Tensor:
    """The clipped surrogate with the weight w of a role (MemBuilder, Eq. 12), elementwise; to be maximised.

    `advantage`: w · min(ρA, clip(ρ) A), what Section 3.4.2 describes and the released code does. `printed`:
    min(w ρA, clip(ρ) A), in which w > 1 amplifies negative advantages alone, and shifts the lower bound of the clip.
    """
    clipped = ratio.clamp(1 - clip, 1 + clip) * advantage
    if weighting == "printed":
        return torch.minimum(weight * ratio * advantage, clipped)
    return weight * torch.minimum(ratio * advantage, clipped)


def grpo_loss(
    logp: Tensor,
    old: Tensor,
    ref: Tensor | None,
    mask: Tensor,
    advantage: Tensor,
    weight: Tensor,
    clip: float = 0.2,
    beta: float = 0.0,
    weighting: Weighting = "advantage",
) -> Tensor:
    """Loss of each trace: mean over its tokens of −surrogate + β k3. Ratios are to π_old, the KL is to π_ref.

    Args:
        logp: [B, T] log-probabilities under the present policy, with gradient.
        old: [B, T] under the policy that sampled.
        ref: [B, T] under the reference; None with β = 0.
        mask: [B, T], 1 at tokens that count; a row without any has loss 0.
        advantage: [B].
        weight: [B], the w of the trace's role.

    Returns:
        [B].
    """
    loss = -surrogate((logp - old).exp(), advantage[:, None], weight[:, None], clip, weighting)
    if ref is not None:
        loss = loss + beta * k3(logp, ref)
    return (loss * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def contrastive_loss(
    logp: Tensor, mask: Tensor, winner: Tensor, loser: Tensor, gap: float, scale: float = 0.15
) -> Tensor:
    """Δ · softplus(−(s_w − s_l) / η) of one pair (SaliMory, Eq. 5; the form is open in the paper).

    s is the mean log-probability per token over a rollout's traces of the role.

    Args:
        logp, mask: [B, T], as of `grpo_loss`.
        winner, loser: [n] rows of the two rollouts.
        gap: Δ, by which the winner is better.
        scale: η.

    Returns:
        [].
    """
    better, worse = ((logp[rows] * mask[rows]).sum() / mask[rows].sum().clamp(min=1) for rows in (winner, loser))
    return gap * softplus(-(better - worse) / scale)


# log-probabilities


class Packed(NamedTuple):
    """N distinct prompts, each in a row with all its completions, of B in all; or B prompts with one completion each.

    A completion stands there as the last token of its prompt and all of its own but the last: what predicts it.

    Attributes:
        ids: [N, L], padded on the right.
        positions: [N, L]; None: as they stand.
        visible: [N, 1, L, L], whether a token (third axis) attends to another: of its own completion or of the prompt.
            None: to all before it.
        targets: [B, T], the completions.
        mask: [B, T], 1 at their tokens.
        places: [B, T], where in the flattened rows each of them is predicted; 0 behind the end.
    """

    ids: Tensor
    positions: Tensor | None
    visible: Tensor | None
    targets: Tensor
    mask: Tensor
    places: Tensor


def pack(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], pad: int, share: bool) -> Packed:
    """Pack B prompts and their completions.

    Args:
        share: put completions of the same prompt in a row, unless attention would then be no less work.
    """
    groups: dict[Any, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt) if share else row, []).append(row)
    longest = max(map(len, completions))
    width = max(len(prompts[rows[0]]) - 1 + sum(len(completions[row]) for row in rows) for rows in groups.values())
    if share and len(groups) * width**2 >= len(prompts) * (max(map(len, prompts)) + longest) ** 2:
        return pack(prompts, completions, pad, share=False)
    shape = (len(groups), width)
    ids, positions, owners = torch.full(shape, pad), torch.zeros(shape, dtype=torch.long), torch.full(shape, -1)
    targets, places = (torch.zeros(len(prompts), longest, dtype=torch.long) for _ in range(2))
    mask = torch.zeros(len(prompts), longest)
    for n, rows in enumerate(groups.values()):
        *before, last = prompts[rows[0]]
        end = len(before)
        ids[n, :end], positions[n, :end], owners[n, :end] = torch.tensor(before), torch.arange(end), 0
        for number, row in enumerate(rows, 1):
            own = completions[row]
            here, count = slice(end, end + len(own)), len(own)
            ids[n, here] = torch.tensor([last, *own][:count])
            positions[n, here], owners[n, here] = len(before) + torch.arange(count), number
            targets[row, :count], mask[row, :count] = torch.tensor(own), 1
            places[row, :count] = n * width + end + torch.arange(count)
            end = here.stop
    if not share:
        return Packed(ids, None, None, targets, mask, places)
    same = (owners[:, :, None] == owners[:, None, :]) | (owners[:, None, :] == 0)
    visible = same & torch.ones(width, width, dtype=torch.bool).tril()
    return Packed(ids, positions, visible[:, None], targets, mask, places)


def can_share(config: Any) -> bool:
    """Whether a model with this configuration takes `Packed.visible` as its mask."""
    plain = getattr(config, "sliding_window", None) is None and getattr(config, "_attn_implementation", "") == "sdpa"
    return plain and config.model_type in KINDS


class PolicyModel(nn.Module):
    """A language model whose forward gives log-probabilities of completions [B, T], 0 behind their ends.

    The head is read inside the forward, so that the hooks of DDP see its weight in use, and some positions at a time.

    Args:
        temperature: of sampling.
    """

    def __init__(self, model: nn.Module, temperature: float = 1.0) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature

    def forward(self, packed: Packed) -> Tensor:
        body, head, counted = body_of(self.model), head_of(self.model), packed.mask > 0
        hidden = body(
            input_ids=packed.ids, attention_mask=packed.visible, position_ids=packed.positions, use_cache=False
        ).last_hidden_state
        states = hidden.flatten(0, 1)[packed.places[counted]]
        with torch.autocast(states.device.type, enabled=False):
            wide = head.wide(accumulation_dtype(states.dtype))
            size = max(LOGITS // len(head.weight), 1)
            parts = zip(states.split(size), packed.targets[counted].split(size), strict=True)
            found = [checkpoint(self._log_p, wide, *part, use_reentrant=False) for part in parts]
        return torch.zeros_like(packed.mask, dtype=wide.weight.dtype).masked_scatter(counted, torch.cat(found))

    def _log_p(self, head: Any, states: Tensor, targets: Tensor) -> Tensor:
        return -cross_entropy(head.logits(states) / self.temperature, targets, reduction="none")
