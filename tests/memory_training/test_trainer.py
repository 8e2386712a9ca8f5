"""The trainer against TRL's own loss, against hand-made batches, and each trap that TRL sets."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from two_roles import END, TwoRoles

trl = pytest.importorskip("trl", reason="needs the extra rl")

from transformers import Qwen3ForCausalLM  # noqa: E402

from remind.core.errors import ModelError  # noqa: E402
from remind.memory_training import trainer as module  # noqa: E402
from remind.memory_training.episodes import Scores, Trace  # noqa: E402
from remind.memory_training.rewards import Pair  # noqa: E402
from remind.memory_training.trainer import MemoryGRPOTrainer, Settings, grpo_arguments  # noqa: E402


def make(
    policy: Path, tokenizer: Any, out: Path, task: Any = None, settings: Settings | None = None, **changes: Any
) -> MemoryGRPOTrainer:
    """Two micro-batches of one group of four rollouts each."""
    defaults = {
        "per_device_train_batch_size": 4,
        "steps_per_generation": 2,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 4,
        "learning_rate": 1e-2,
        "beta": 0.02,
        "max_steps": 2,
    }
    args = grpo_arguments(str(out), 0, **defaults | changes)
    model = Qwen3ForCausalLM.from_pretrained(policy)
    return MemoryGRPOTrainer(task or TwoRoles(), list(range(40)), settings or Settings(), model, tokenizer, args)


@pytest.fixture
def trainer(policy: Path, tokenizer: Any, tmp_path: Path) -> MemoryGRPOTrainer:
    return make(policy, tokenizer, tmp_path)


def rows(*numbers: int, copies: int = 4) -> list[dict[str, Any]]:
    return [{"prompt": "", "row": n} for n in numbers for _ in range(copies)]


def scored(trainer: MemoryGRPOTrainer, *numbers: int) -> list[Any]:
    trainer.model.train()
    return list(trainer._generate_and_score_completions(rows(*numbers))["chunk"])


def test_defaults_of_trl_are_overruled(trainer: MemoryGRPOTrainer) -> None:
    args = trainer.args
    assert (args.bf16, args.gradient_checkpointing, args.use_bias_correction_kl) == (False, False, False)
    assert (args.loss_type, args.shuffle_dataset, args.save_strategy.value) == ("grpo", False, "no")
    assert args.report_to in ([], ["none"])


def test_nothing_is_told_to_anyone(
    policy: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr("trl.trainer.base_trainer.send_telemetry", lambda *args, **kwargs: told.append(args))
    make(policy, tokenizer, tmp_path)
    assert not told


def scripted(prompts: list[list[int]]) -> list[list[int]]:
    """A completion that names its prompt; with an `a` after even prompts."""
    return [[2, prompt[0], END] if prompt[0] % 2 else [prompt[-1], END] for prompt in prompts]


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_vllm_answers_in_place_of_the_model(
    mode: str, policy: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in with the interface that TRL has for it gets each lockstep's prompts, and new weights every step."""
    told: list[Any] = []

    class Engine:
        class vllm_client:
            get_server_info = staticmethod(lambda: {"model_config": {"logprobs_mode": "processed_logprobs"}})

        def __init__(self, mode: str, temperature: float, **_: Any) -> None:
            told.append((mode, temperature))

        def sync_weights(self) -> None:
            told.append("weights")

        def generate(self, prompts: Any, images: Any, num_generations: int, profiler: Any) -> Any:
            assert (images, num_generations) == (None, 1)
            told.append(len(prompts))
            replies = scripted(prompts)
            return None, replies, [[[0.0]] * len(reply) for reply in replies], None

    theirs = import_module("trl.trainer.grpo_trainer")
    monkeypatch.setattr(theirs, "VLLMGeneration", Engine)
    trainer = make(policy, tokenizer, tmp_path, use_vllm=True, vllm_mode=mode, temperature=0.8)
    chunks = scored(trainer, 0, 1)
    assert told == [(mode, 0.8), "weights", 8, 4]
    assert sum(chunk.total for chunk in chunks) / 2 == 12
    trainer.state.global_step = 1
    scored(trainer, 2, 3)
    assert told[4:] == ["weights", 8, 4]


@pytest.mark.parametrize("more", [0, 3])
def test_episodes_run_in_lockstep_and_keep_their_own_replies(trainer: MemoryGRPOTrainer, more: int) -> None:
    """Another process may ask more: then stand-ins are generated, and dropped."""
    asked: list[int] = []

    def generate(prompts: list[list[int]], *_: Any) -> tuple[list[list[int]], None]:
        asked.append(len(prompts))
        return scripted(prompts), None

    trainer._generate_single_turn = generate
    trainer._most = lambda count: count + more if count else 0
    task = TwoRoles()
    outcomes, traces = trainer._lockstep([task.episode(row) for row in (0, 1, 2)])
    # rows 0 and 2 begin with 3 and 5: their first reply has one `a`, so that `second` is asked once
    assert asked == [3 + more, 2 + more]
    assert outcomes == [[[2, 3, END], [2, 5, END]], [[4, END]], [[2, 5, END], [2, 5, END]]]
    assert traces[0] == [Trace("first", [3, 4], [2, 3, END]), Trace("second", [5, 6, 2], [2, 5, END])]
    assert [len(own) for own in traces] == [2, 1, 2]


def test_every_trace_is_in_one_micro_batch_whatever_their_number(trainer: MemoryGRPOTrainer) -> None:
    seen: list[tuple[str, list[int], list[int]]] = []
    inner = trainer._lockstep

    def spy(episodes: Any) -> Any:
        outcomes, traces = inner(episodes)
        seen.extend((t.role, t.prompt, t.completion) for own in traces for t in own)
        return outcomes, traces

    trainer._lockstep = spy
    trainer.model.train()
    found, chunks = [], []
    for _ in range(2):
        (chunk,) = trainer._prepare_inputs(rows(0, 1))["chunk"]
        trainer._step += 1
        chunks.append(chunk)
        for n, role in enumerate(chunk.roles):
            prompt = chunk.prompt[n][chunk.prompt_mask[n] == 1].tolist()
            found.append((role, prompt, chunk.completion[n][chunk.mask[n] == 1].tolist()))
    assert sorted(found) == sorted(seen)
    # an odd number, which halves would not hold
    assert chunks[0].total == chunks[1].total == len(seen) == sum(int(chunk.real.sum()) for chunk in chunks)
    assert {len(chunk.roles) for chunk in chunks} != {len(seen) / 2}
    assert all(
        chunk.weight[n] == (4.0 if role == "first" else 1.0) for chunk in chunks for n, role in enumerate(chunk.roles)
    )


def test_a_micro_batch_without_traces_moves_nothing(trainer: MemoryGRPOTrainer) -> None:
    chunk = trainer._with_references(trainer._chunk([], [], 0, 0), check=False)
    loss = trainer.compute_loss(trainer.model, {"chunk": [chunk]})
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is None or not p.grad.any() for p in trainer.model.parameters())


def test_loss_is_trls_own_at_weight_one(trainer: MemoryGRPOTrainer) -> None:
    chunks = scored(trainer, 0, 1)
    torch.manual_seed(3)
    for chunk in chunks:
        noise = [0.3 * torch.randn(chunk.completion.shape) for _ in range(2)]
        logp = trainer._logp(trainer.model, chunk).detach()
        batch = {
            "prompt_ids": chunk.prompt,
            "prompt_mask": chunk.prompt_mask,
            "completion_ids": chunk.completion,
            "completion_mask": chunk.mask,
            "advantages": torch.randn(len(chunk.roles)),
            "old_per_token_logps": logp + noise[0],
            "ref_per_token_logps": logp + noise[1],
        }
        trainer.current_gradient_accumulation_steps = 1
        theirs = trl.GRPOTrainer._compute_loss(trainer, trainer.model, batch)
        own = {
            "advantage": batch["advantages"],
            "weight": torch.ones(len(chunk.roles)),
            "old": batch["old_per_token_logps"],
            "ref": batch["ref_per_token_logps"],
            "total": float(len(chunk.roles)),
        }
        ours = trainer.compute_loss(trainer.model, {"chunk": [module.Chunk(**{**vars(chunk), **own})]})
        assert abs(theirs.item() - ours.item()) < 1e-5
        parameters = [p for p in trainer.model.parameters() if p.requires_grad]
        for one, other in zip(
            torch.autograd.grad(theirs, parameters), torch.autograd.grad(ours, parameters), strict=True
        ):
            assert (one - other).abs().max() < 1e-5


def gradients(trainer: MemoryGRPOTrainer, chunks: list[Any]) -> list[torch.Tensor]:
    trainer.model.zero_grad()
    for chunk in chunks:
        trainer.compute_loss(trainer.model, {"chunk": [chunk]}).backward()
    return [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]


def test_two_micro_batches_are_one(policy: Path, tokenizer: Any, tmp_path: Path) -> None:
    """The mean is over the traces of the generation, not over means of micro-batches."""
    small = make(policy, tokenizer, tmp_path)
    large = make(
        policy,
        tokenizer,
        tmp_path,
        per_device_train_batch_size=8,
        steps_per_generation=1,
        gradient_accumulation_steps=1,
    )
    both = [gradients(trainer, scored(trainer, 0, 1)) for trainer in (small, large)]
    for one, other in zip(*both, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_the_reference_must_be_where_training_begins(trainer: MemoryGRPOTrainer) -> None:
    (chunk, _) = scored(trainer, 0, 1)
    assert trainer.ref_model is not None
    logp = trainer._logp(trainer.model, chunk)
    assert ((logp - chunk.ref) * chunk.mask).abs().max() < 1e-5
    with torch.no_grad():
        trainer.model.lm_head.weight += torch.randn_like(trainer.model.lm_head.weight)
    with pytest.raises(ModelError, match="the reference is not the policy"):
        scored(trainer, 0, 1)
    # later on it is expected to be another
    trainer._step = 2
    scored(trainer, 0, 1)


def weights(trainer: MemoryGRPOTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def test_updates_of_a_generation_end_where_the_policy_has_moved_too_far(
    policy: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """The first inner step has divergence 0 and is taken; all others are not, and the next generation begins anew."""
    trained = {}
    for name, iterations, limit, steps in (("one", 1, None, 2), ("stopped", 3, 0.0, 6), ("free", 3, None, 6)):
        trainer = make(
            policy,
            tokenizer,
            tmp_path / name,
            settings=Settings(kl_stop=limit),
            num_iterations=iterations,
            max_steps=steps,
            weight_decay=0.0,
            optim="sgd",
        )
        trainer.train()
        trained[name] = weights(trainer)
    assert torch.allclose(trained["stopped"], trained["one"], atol=1e-6)
    assert not torch.allclose(trained["free"], trained["one"], atol=1e-4)


class Contrasted(TwoRoles):
    def score(self, row: int, outcomes: Any) -> Scores:
        return Scores({"first": [0.0] * 4, "second": [0.0] * 4}, pairs=(Pair("first", 0, 3, 0.5),))


def test_contrast_reads_the_traces_of_its_pair(policy: Path, tokenizer: Any, tmp_path: Path) -> None:
    settings = Settings(contrast={"first": 0.15})
    trainer = make(policy, tokenizer, tmp_path, Contrasted(), settings, beta=0.0)
    for chunk in scored(trainer, 0, 1):
        ((role, gap, winner, loser),) = chunk.pairs
        assert (role, gap) == ("first", 0.5)
        assert [chunk.roles[int(n)] for n in (*winner, *loser)] == ["first", "first"]
        firsts = [n for n, role in enumerate(chunk.roles) if role == "first"]
        assert [int(winner), int(loser)] == [firsts[0], firsts[3]]
        logp = trainer._logp(trainer.model, chunk)
        s = [float((logp.detach()[n] * chunk.mask[n]).sum() / chunk.mask[n].sum()) for n in (firsts[0], firsts[3])]
        expected = 0.15 * 0.5 * torch.tensor(-(s[0] - s[1]) / 0.15).exp().log1p() / 2
        assert trainer.compute_loss(trainer.model, {"chunk": [chunk]}).item() == pytest.approx(
            float(expected), rel=1e-4
        )


@pytest.fixture(autouse=True)
def without_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may leave a pickle."""
    monkeypatch.setattr(torch, "save", lambda *_, **__: pytest.fail("a pickle was written"))


def test_a_learnable_task_is_learnt(policy: Path, tokenizer: Any, tmp_path: Path) -> None:
    trainer = make(policy, tokenizer, tmp_path, max_steps=12, beta=0.0)
    trainer.train()
    worth = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    assert sum(worth[-3:]) / 3 > sum(worth[:3]) / 3 + 1
