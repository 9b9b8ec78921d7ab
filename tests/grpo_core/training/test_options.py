"""What each option of training does to a run, seen from outside: weights, metrics, completions, result."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from grpo_core.config.files import parse_config
from grpo_core.config.inputs import RewardConfig
from grpo_core.data.order import Schedule
from grpo_core.data.prompts import Prompts
from grpo_core.distributed import range_of_process
from grpo_core.errors import TrainingError
from grpo_core.model import policy as policies_module
from grpo_core.model.loading import load_model
from grpo_core.model.policy import PassInputs, Policy
from grpo_core.model.sequences import Sequences
from grpo_core.planning.plan import load_plan
from grpo_core.rewards.contract import resolve
from grpo_core.rollout.collect import Scoring, sample_and_score
from grpo_core.rollout.requests import group_requests
from grpo_core.rollout.transformers_engine import TransformersEngine
from grpo_core.rollout.types import Sampling
from tests.conftest import with_keys
from tests.grpo_core.training.training import are_close, checkpoint_of, metrics_of, result_of, trained_run, weights_of

CALM_ADAM = {"adam_epsilon": 1e-3}


@pytest.fixture
def two_layers(values: dict[str, Any], smooth_model_folder: Path) -> dict[str, Any]:
    """The configuration with a model of two layers."""
    return with_keys(values, name_or_path=str(smooth_model_folder))


# Passes as memory allows.

OFF_POLICY = {"steps_per_generation": 4, "num_iterations": 2}


def _refuse_more_tokens_than(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that runs out cannot be had on a CPU: every second forward pass says so in its place, so that an update is
    interrupted when a part of its gradient is there already."""
    forward, calls = Policy.forward, 0

    def small(self: Policy, inputs: PassInputs, **options: Any) -> Any:
        nonlocal calls
        calls += self.temperature != 1  # the probe's is 1
        tokens = inputs.tokens.input_ids.shape[1] + inputs.shape[0]  # of a completion, the last is no input
        if self.temperature != 1 and tokens > limit and calls % 2 == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, inputs, **options)

    monkeypatch.setattr(Policy, "forward", small)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, {"beta": 0.1, **OFF_POLICY}, {"loss_type": "bnpo"}], ids=["dapo", "kl", "bnpo"])
def test_when_memory_runs_out_training_goes_on_with_smaller_passes(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    values = with_keys(values, **CALM_ADAM, **keys, temperature=0.9)
    whole = trained_run(tmp_path / "whole", values)
    _refuse_more_tokens_than(30, monkeypatch)  # two completions have 24 at most
    small = trained_run(tmp_path / "small", values)
    result, result_of_whole = result_of(small), result_of(whole)
    assert 12 <= result["tokens_per_pass"] <= 30 < result_of_whole["tokens_per_pass"]
    assert result["ran_out_of_memory"]
    assert not result_of_whole["ran_out_of_memory"]
    assert result["counted"] == result_of_whole["counted"]
    assert are_close(whole, small)


@pytest.mark.slow
def test_when_memory_runs_out_with_one_completion_layers_are_computed_again(
    two_layers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = with_keys(two_layers, **CALM_ADAM, temperature=0.9)
    whole = trained_run(tmp_path / "whole", values)
    policies: set[Policy] = set()
    forward = Policy.forward

    def small(self: Policy, inputs: PassInputs, **options: Any) -> Any:
        if self.temperature != 1:
            policies.add(self)
            if self.recomputed < 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, inputs, **options)

    monkeypatch.setattr(Policy, "forward", small)
    computed_again = trained_run(tmp_path / "small", values)
    assert [policy.recomputed for policy in policies] == [2]
    assert result_of(computed_again)["ran_out_of_memory"]
    assert are_close(whole, computed_again)


@pytest.mark.parametrize("recomputed", [1, 2])
def test_some_layers_computed_again_or_all_leave_the_gradient_as_it_is(
    smooth_model_folder: Path, recomputed: int
) -> None:
    sequences = Sequences(torch.randint(3, 13, (3, 9)), torch.full((3,), 4), torch.full((3,), 5), torch.arange(3))
    gradients, calls = [], []
    for layers in (0, recomputed):
        policy = Policy(load_model(smooth_model_folder), 1.0)
        policy.recompute(layers)
        for layer in policy.recomputable:
            layer.mlp.register_forward_pre_hook(lambda *_: calls.append(0))
        calls.clear()
        policy(policy.prepare(sequences))[0].sum().backward()
        assert len(calls) == 2 + layers
        gradients.append([parameter.grad for parameter in policy.parameters()])
    assert all(torch.equal(kept, again) for kept, again in zip(*gradients, strict=True))


def test_a_single_completion_too_large_for_memory_is_said(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse_more_tokens_than(0, monkeypatch)
    with pytest.raises(TrainingError, match="memory runs out with a single completion"):
        trained_run(tmp_path / "run", values, temperature=0.9)


# Model and reference.


def test_gradient_checkpointing_recomputes_the_layers_and_changes_nothing(
    two_layers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    forward = Qwen2DecoderLayer.forward

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        calls["with gradient" if torch.is_grad_enabled() else "without"] += 1
        return forward(self, *args, **options)

    monkeypatch.setattr(Qwen2DecoderLayer, "forward", counted)
    monkeypatch.setattr(policies_module, "why_not_packed", lambda _: "")  # which computes gradients too
    monkeypatch.setattr(policies_module, "check_recomputing", lambda _: None)
    plain = trained_run(tmp_path / "plain", two_layers)
    once = calls.copy()
    calls.clear()
    recomputed = trained_run(tmp_path / "recomputed", two_layers, gradient_checkpointing=True)
    assert calls["with gradient"] == 2 * once["with gradient"]
    assert calls["without"] == once["without"]
    a, b = weights_of(plain), weights_of(recomputed)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_between_passes_no_layer_is_in_training_mode(model_folder: Path) -> None:
    """Else sampling with the same model would lose its key-value cache."""
    policy = Policy(load_model(model_folder), 1.0, gradient_checkpointing=True)
    sequences = Sequences(torch.tensor([[1, 2, 3]]), torch.tensor([1]), torch.tensor([2]), torch.tensor([0]))
    logprobs, _ = policy(policy.prepare(sequences))
    assert logprobs.requires_grad
    assert not any(module.training for module in policy.model.modules())


@pytest.mark.slow
def test_an_adapter_trains_its_layers_only_and_the_model_handed_on_needs_no_adapter(
    values: dict[str, Any], tmp_path: Path, model_folder: Path
) -> None:
    targets = ["q_proj", "down_proj"]
    run = trained_run(tmp_path / "run", values, use_peft=True, lora_r=4, lora_target_modules=targets, beta=0.1)
    before, after = load_file(model_folder / "model.safetensors"), weights_of(run)
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if any(f"{target}.weight" in name for target in targets)}
    for name in moved:
        assert torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-4) <= 4
    kl = [step["kl"] for step in metrics_of(run)]
    assert kl[0] == pytest.approx(0, abs=1e-7), "the reference is the base, and the adapter starts as no change"
    assert kl[-1] > 1e-5
    assert {name.split(".")[-3] for name in _checkpoint_names(tmp_path, values)} == {"lora_A", "lora_B"}


def _checkpoint_names(tmp_path: Path, values: dict[str, Any]) -> list[str]:
    run = trained_run(tmp_path / "saved", values, use_peft=True, save_steps=2)
    return list(checkpoint_of(run, 2)["model"])


def test_the_reference_moves_towards_the_policy_when_it_is_synced(
    values: dict[str, Any], tmp_path: Path, model_folder: Path
) -> None:
    keys = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.6}
    run = trained_run(tmp_path / "run", values, **keys, max_steps=4, save_steps=1, save_total_limit=4)
    base = load_file(model_folder / "model.safetensors")
    first, second, third = (checkpoint_of(run, step) for step in (1, 2, 3))
    for name, weight in base.items():
        assert torch.equal(first["reference"][name], weight)
        expected = 0.6 * second["model"][name] + 0.4 * weight
        assert torch.allclose(second["reference"][name], expected, atol=1e-6)
        assert torch.equal(third["reference"][name], second["reference"][name])


def test_adaptive_entropy_raises_its_weight_below_the_target_and_lowers_it_above(
    values: dict[str, Any], tmp_path: Path
) -> None:
    keys = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_coef_delta": 0.005, "max_steps": 4}
    low = metrics_of(trained_run(tmp_path / "low", values, **keys, entropy_target=50.0))
    assert [step["entropy_coef"] for step in low] == pytest.approx([0, 0.015, 0.02, 0.025])
    high = metrics_of(trained_run(tmp_path / "high", values, **keys, entropy_target=0.0))
    assert [step["entropy_coef"] for step in high] == [0, 0, 0, 0]


@pytest.mark.usefixtures("endless")
def test_an_update_without_a_trained_token_says_nothing_about_entropy_and_adapts_nothing(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values["rewards"] = [{"function": "tests.grpo_core.training.test_options:only_odd_prompts"}]
    adaptive = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 50.0}
    keys = {"mask_truncated_completions": True, "entropy_action": "stop", "patience": 1, **adaptive}
    run = trained_run(tmp_path / "run", values, **keys, max_steps=3, save_steps=2)
    for step in metrics_of(run):
        assert (step["loss"], step["grad_norm"]) == (0, 0)
        assert not {"entropy", "sampling/sampling_logp_difference/mean"} & step.keys()
    assert checkpoint_of(run, 2)["state"]["entropy_coef"] == 0.01
    assert "no token trained" in capsys.readouterr().out


@pytest.mark.parametrize("entropy_coef", [0.0, 1e-6])
def test_without_an_advantage_figures_are_of_the_policys_own_log_probabilities(
    values: dict[str, Any], tmp_path: Path, entropy_coef: float
) -> None:
    """With an entropy bonus, of the rows that it trains; else of the one row of an update without a gradient."""
    values["rewards"] = [{"function": "tests.grpo_core.training.test_health:constant"}]
    steps = metrics_of(trained_run(tmp_path / "run", values, **OFF_POLICY, entropy_coef=entropy_coef))
    assert [step["reward_std"] for step in steps] == [0.0] * 4
    assert max(step["sampling/sampling_logp_difference/max"] for step in steps) < 1e-3
    assert max(abs(step["sampling/importance_sampling_ratio/mean"] - 1) for step in steps) < 1e-3


@pytest.mark.slow
def test_an_entropy_bonus_keeps_the_policy_more_varied(values: dict[str, Any], tmp_path: Path) -> None:
    plain = metrics_of(trained_run(tmp_path / "plain", values, max_steps=6))
    varied = metrics_of(trained_run(tmp_path / "varied", values, max_steps=6, entropy_coef=1.0))
    assert varied[-1]["entropy"] > plain[-1]["entropy"] + 0.1


# Sampling.


def only_odd_prompts(prompts: list[str], completion_ids: list[list[int]]) -> list[float | None]:
    """Tells completions apart where the first number is odd, and nowhere else."""
    return [
        float(sum(ids) % 7) if int(prompt.split("+")[0]) % 2 else 0.0
        for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


LENGTHS: list[int] = []


def only_odd_prompts_counted(prompts: list[str], completion_ids: list[list[int]]) -> list[float | None]:
    LENGTHS.extend(map(len, completion_ids))
    return only_odd_prompts(prompts, completion_ids)


def test_groups_without_signal_are_replaced_by_fresh_prompts(values: dict[str, Any], tmp_path: Path) -> None:
    LENGTHS.clear()
    values["rewards"] = [{"function": "tests.grpo_core.training.test_options:only_odd_prompts_counted"}]
    run = trained_run(tmp_path / "run", values, dynamic_sample=True, max_resample_times=20)
    plan, result = load_plan(run / "plan.json"), result_of(run)
    for step in metrics_of(run):
        assert step["frac_reward_zero_std"] == 0
    assert sum(step["dynamic_sampling/resampled_groups"] for step in metrics_of(run)) > 0
    assert plan.completions < result["sampled_completions"] <= plan.max_completions
    assert (result["sampled_completions"], result["sampled_tokens"]) == (len(LENGTHS), sum(LENGTHS))
    assert result["counted"] == plan.counts(plan.max_steps), "the schedule of prompts is not moved by replacements"
    trained_tokens = []
    for index in range(plan.rollouts):
        table = pq.read_table(run / "training" / "completions" / f"rollout-{index:06d}.parquet").to_pydict()
        assert all(int(prompt.split("+")[0]) % 2 for prompt in table["prompt"])
        assert Counter(Counter(table["prompt"]).values()) == {4: 4}, "whole groups, each of another prompt"
        # A prompt has one token per character.
        trained_tokens.append(sum(map(len, table["prompt"])) + sum(table["completion_tokens"]))
    assert [step["num_tokens"] for step in metrics_of(run)] == [*accumulate(trained_tokens)]


def only_odd_prompts_apply(prompts: list[str], completion_ids: list[list[int]]) -> list[float | None]:
    values = only_odd_prompts(prompts, completion_ids)
    return [value if int(p.split("+")[0]) % 2 else None for value, p in zip(values, prompts, strict=True)]


def test_a_first_draw_that_no_reward_scored_is_replaced_and_has_no_first_reward(
    values: dict[str, Any], tmp_path: Path
) -> None:
    values["rewards"] = [{"function": "tests.grpo_core.training.test_options:only_odd_prompts_apply"}]
    keys = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 6}
    steps = metrics_of(trained_run(tmp_path / "run", values, **keys, dynamic_sample=True, max_resample_times=20))
    unscored = [step for step in steps if "dynamic_sampling/first_reward" not in step]
    assert 0 < len(unscored) < len(steps) == 6
    assert all(step["dynamic_sampling/resampled_groups"] > 0 for step in unscored)


def test_replacements_end_at_their_bound(values: dict[str, Any], tmp_path: Path) -> None:
    values["rewards"] = [{"function": "tests.grpo_core.training.test_health:constant"}]
    run = trained_run(tmp_path / "run", values, dynamic_sample=True, max_resample_times=2)
    plan = load_plan(run / "plan.json")
    assert result_of(run)["sampled_completions"] == plan.max_completions == 3 * plan.completions
    assert {step["frac_reward_zero_std"] for step in metrics_of(run)} == {1}


@pytest.mark.parametrize(("processes", "g", "groups"), [(8, 4, 1), (4, 2, 1), (3, 2, 1), (8, 6, 2), (2, 3, 3)])
def test_processes_share_groups_out_whatever_their_number_and_ask_for_nothing_twice_or_in_vain(
    values: dict[str, Any], processes: int, g: int, groups: int
) -> None:
    config = parse_config(with_keys(values, num_generations=g, per_device_train_batch_size=g))
    turns, prompts = [(0, row) for row in range(groups)], Prompts([{}] * groups, [[row] for row in range(groups)], 1)

    def drawn(processes: int) -> list[tuple[list[int], int]]:
        found = []
        for place in range(processes):
            mine = range_of_process(groups * g, place, processes)
            requests = group_requests(config, prompts, turns, mine, attempt=0)
            assert all(request.num_completions > 0 for request in requests)
            assert [request.row for request in requests] == [request.prompt_ids[0] for request in requests]
            found += [(r.prompt_ids, r.seed + i) for r in requests for i in range(r.num_completions)]
        return found

    assert drawn(processes) == drawn(1)
    assert len(drawn(1)) == groups * g


def test_a_process_without_a_share_of_the_prompts_scores_nothing(model_folder: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(model_folder), load_model(model_folder)
    rewards = [resolve(RewardConfig(function="length"))]
    engine = TransformersEngine(model, tokenizer)
    samples, _ = sample_and_score(engine, [], Sampling(4), Prompts([], [], 0), Scoring(tokenizer, rewards))
    assert samples == []


def test_prompts_are_seen_in_the_planned_order(values: dict[str, Any], tmp_path: Path) -> None:
    run = trained_run(tmp_path / "run", values, num_iterations=2, max_steps=14)  # an epoch, and a rollout of the next
    plan = load_plan(run / "plan.json")
    rows = pq.read_table(run / "dataset" / "train.parquet")["prompt"].to_pylist()
    for index in range(plan.rollouts):
        table = pq.read_table(run / "training" / "completions" / f"rollout-{index:06d}.parquet").to_pydict()
        assert table["prompt"][::4] == [rows[row] for row in Schedule(plan, 0).prompts(index)]
        assert table["prompt_tokens"][0] == len(table["prompt"][0])
        assert max(table["completion_tokens"]) <= 6
