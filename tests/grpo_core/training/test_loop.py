"""The loop: killed and resumed, cut into other micro-batches or processes, it ends with the same weights."""

from __future__ import annotations

import copy
import json
import math
import socket
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_core.config.files import load_config
from grpo_core.data.order import training_order
from grpo_core.errors import RewardError, TrainingError
from grpo_core.planning.plan import load_plan
from grpo_core.training.loop import train
from tests.conftest import config_values, make_run, with_keys
from tests.grpo_core.rollout.vllm_engine import plain_logprobs
from tests.grpo_core.training.several import in_processes
from tests.grpo_core.training.training import are_close, metrics_of, trained_run, weights_of

# Some gradients are zero except for rounding (a key bias, under softmax); Adam with its usual epsilon would make a full
# step of that noise.
CALM_ADAM = {"adam_epsilon": 1e-3}
EVERYTHING = {
    "dynamic_sample": True,
    "max_resample_times": 1,
    "top_entropy_quantile": 0.6,
    "entropy_coef": 0.05,
    "eval_steps": 3,
    "off_policy_mask_threshold": 0.1,
}
WINDOWS = {"num_iterations": 2, "steps_per_generation": 4, "beta": 0.1, "max_steps": 7}


@pytest.fixture(scope="module", params=[{}, WINDOWS], ids=["on-policy", "inside a generation window, with KL"])
def run(request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run = trained_run(folder / "run", config_values(model_folder, folder), **request.param)
    AcceleratorState._reset_state(reset_partial_state=True)
    return run


def test_what_the_plan_says_is_what_happens(run: Path) -> None:
    plan = load_plan(run / "plan.json")
    result = json.loads((run / "training" / "result.json").read_text())
    assert result["counted"] == result["planned"] == plan.counts(plan.max_steps)
    assert [step["step"] for step in metrics_of(run)] == list(range(1, plan.max_steps + 1))
    assert len(list((run / "training" / "completions").iterdir())) == plan.rollouts


@pytest.mark.slow
def test_the_engines_log_probabilities_are_the_trainers(run: Path) -> None:
    for step in metrics_of(run):
        assert step["sampling/sampling_logp_difference/max"] <= 1e-4


def test_training_raises_the_reward(values: dict[str, Any], tmp_path: Path) -> None:
    values["rewards"] = [{"function": "length", "args": {"target": 3}}]
    metrics = metrics_of(trained_run(tmp_path / "run", values, max_steps=16))
    first, last = ([m["reward"] for m in part] for part in (metrics[:5], metrics[-5:]))
    assert sum(last) / 5 > sum(first) / 5 + 0.2


def test_a_penalised_sample_is_weighted_by_the_ratio_of_the_two_policies(
    values: dict[str, Any], tmp_path: Path
) -> None:
    """On-policy too, where the weights are 1 without a penalty."""
    run = trained_run(tmp_path / "run", values, repetition_penalty=1.3)
    for step in metrics_of(run):
        low, high = (step[f"sampling/importance_sampling_ratio/{which}"] for which in ("min", "max"))
        assert low < 0.9 < 1.1 < high
    model = AutoModelForCausalLM.from_pretrained(values["model"]["name_or_path"]).eval()
    for row in pq.read_table(run / "training" / "completions" / "rollout-000000.parquet").to_pylist():
        ids = row["prompt_ids"] + row["completion_ids"]
        expected = plain_logprobs(model, ids, penalty=1.3)[len(row["prompt_ids"]) - 1 :]
        assert row["sampling_logprobs"] == pytest.approx(expected, abs=1e-4)


def test_a_text_to_stop_at_is_trained_and_not_shown_to_rewards(values: dict[str, Any], tmp_path: Path) -> None:
    run = trained_run(tmp_path / "run", values, stop=["7", "12"], min_p=0.01)
    tokenizer = AutoTokenizer.from_pretrained(values["model"]["name_or_path"])
    rows = pq.read_table(run / "training" / "completions").to_pylist()
    stopped = 0
    for row in rows:
        whole = tokenizer.decode(row["completion_ids"], skip_special_tokens=True)
        ending = next((text for text in ("7", "12") if whole.endswith(text)), "")
        assert row["completion"] == whole.removesuffix(ending)
        assert not {"7", "12"} & {row["completion"][at : at + n] for at in range(6) for n in (1, 2)}
        assert row["truncated"] == (not ending and row["completion_ids"][-1] != tokenizer.eos_token_id)
        assert len(row["sampling_logprobs"]) == len(row["completion_ids"])
        stopped += bool(ending)
    assert 0 < stopped < len(rows)


def test_in_bf16_sampler_and_trainer_still_agree(values: dict[str, Any], tmp_path: Path) -> None:
    for step in metrics_of(trained_run(tmp_path / "run", values, mixed_precision="bf16")):
        assert step["sampling/sampling_logp_difference/mean"] < 0.02


@pytest.mark.parametrize(
    "loss_type", ["dapo", *(pytest.param(name, marks=pytest.mark.e2e) for name in ("grpo", "dr_grpo"))]
)
def test_half_the_batch_with_twice_the_accumulation_is_the_same_update(
    values: dict[str, Any], tmp_path: Path, loss_type: str
) -> None:
    values = with_keys(values, **CALM_ADAM, loss_type=loss_type)
    whole = trained_run(tmp_path / "whole", values)
    halves = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    assert are_close(whole, trained_run(tmp_path / "halves", values, **halves))


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("masked", [True, False])
def test_truncated_completions_move_the_model_unless_they_are_masked(
    values: dict[str, Any], tmp_path: Path, model_folder: Path, masked: bool
) -> None:
    values["rewards"] = [{"function": "tests.grpo_core.training.test_loop:parity"}]
    run = trained_run(tmp_path / "run", values, mask_truncated_completions=masked)
    metrics = metrics_of(run)
    assert {step["completions/clipped_ratio"] for step in metrics} == {1}
    assert metrics[0]["frac_reward_zero_std"] < 1
    before, after = load_file(model_folder / "model.safetensors"), weights_of(run)
    assert masked == all(torch.equal(before[name], after[name]) for name in before)


SAMPLED: list[tuple[list[str], list[list[int]]]] = []


def recorded(prompts: list[str], completion_ids: list[list[int]]) -> list[float | None]:
    SAMPLED.append((prompts, completion_ids))
    return [float(sum(ids) % 5) for ids in completion_ids]


def _plain_training(run: Path) -> torch.nn.Module:
    """Trains on what SAMPLED holds, one completion at a time, in float64."""
    config, plan = load_config(run / "config.toml"), load_plan(run / "plan.json")
    keys, limit, temperature = config.train, config.rollout.max_completion_length, config.rollout.temperature
    algorithm = config.algorithm
    folder = config.model.name_or_path
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).double()
    base = copy.deepcopy(model)

    def logprobs(of: Any, prompt: str, ids: list[int]) -> torch.Tensor:
        start = tokenizer(prompt)["input_ids"]
        logits = of(torch.tensor([start + ids])).logits[0, len(start) - 1 : -1] / temperature
        return logits.log_softmax(-1)[range(len(ids)), ids]

    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}])
    current = -1
    for step in range(plan.max_steps):
        loss, micro_steps = torch.zeros((), dtype=torch.float64), list(plan.micro_steps(step))
        for micro_step in micro_steps:
            if micro_step.rollout != current:
                current = micro_step.rollout
                rows = list(zip(*SAMPLED[current], strict=True))
                with torch.no_grad():
                    old = [logprobs(model, *row) for row in rows]
                    reference = [logprobs(base, *row) for row in rows]
                rewards = [float(sum(ids) % 5) for _, ids in rows]
                trained = [
                    not algorithm.mask_truncated_completions or len(ids) < limit or ids[-1] == tokenizer.eos_token_id
                    for _, ids in rows
                ]
                tokens = sum(len(ids) for (_, ids), used in zip(rows, trained, strict=True) if used)
            for i in training_order(plan, config.seed, current)[micro_step.slice, 0]:
                group = rewards[i // 4 * 4 : i // 4 * 4 + 4]
                advantage = (rewards[i] - statistics.mean(group)) / (statistics.stdev(group) + 1e-4)
                new = logprobs(model, *rows[i])
                ratio, distance = (new - old[i]).exp(), reference[i] - new
                surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
                per_token = -surrogate + algorithm.beta * ratio * (distance.exp() - distance - 1)
                share = max(tokens, 1) * len(micro_steps) / plan.steps_per_generation
                loss = loss + per_token.sum() / share * trained[i]
        warm, whole = plan.warmup_steps, plan.max_steps
        rate = keys.learning_rate * (step / warm if step < warm else (whole - step) / (whole - warm))
        optimizer.param_groups[0]["weight_decay"] = keys.weight_decay
        for group in optimizer.param_groups:
            group.update(lr=rate, betas=(keys.adam_beta1, keys.adam_beta2), eps=keys.adam_epsilon)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        for p in model.parameters():
            p.grad *= min(1.0, keys.max_grad_norm / norm)
        optimizer.step()
    return model


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"max_steps": 5}, marks=pytest.mark.e2e),
        {"max_steps": 3, "mask_truncated_completions": True},
        {"max_steps": 10, "steps_per_generation": 4, "num_iterations": 2, "beta": 0.3},
        {"max_steps": 7, "gradient_accumulation_steps": 3, "steps_per_generation": 2, "num_iterations": 2},
    ],
    ids=["on-policy", "truncated masked", "four updates a rollout, KL", "updates that straddle rollouts"],
)
def test_the_trained_weights_are_those_of_plain_loops_over_the_same_samples(
    values: dict[str, Any], tmp_path: Path, keys: dict[str, Any]
) -> None:
    SAMPLED.clear()
    values["rewards"] = [{"function": "tests.grpo_core.training.test_loop:recorded"}]
    values["rollout"]["temperature"] = 0.8
    common = {"weight_decay": 0.1, "warmup_steps": 2, "max_grad_norm": 0.5, "adam_beta2": 0.9, "epsilon_high": 0.28}
    run = trained_run(tmp_path / "run", values, **CALM_ADAM, **common, **keys)
    plain, trained = _plain_training(run).state_dict(), weights_of(run)
    assert max(float((plain[name] - trained[name]).abs().max()) for name in trained) < 2e-5


def parity(completion_ids: list[list[int]]) -> list[float | None]:
    return [float(ids[0] % 2) for ids in completion_ids]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alone", "both"),
    [
        pytest.param(
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2},
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
            id="one update a rollout",
            marks=pytest.mark.e2e,
        ),
        pytest.param(
            {
                "per_device_train_batch_size": 6,
                "steps_per_generation": 4,
                "gradient_accumulation_steps": 2,
                "beta": 0.1,
            },
            {
                "per_device_train_batch_size": 3,
                "steps_per_generation": 4,
                "gradient_accumulation_steps": 2,
                "beta": 0.1,
            },
            id="two updates a rollout, KL",
            marks=pytest.mark.e2e,
        ),
        pytest.param(
            {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1},
            {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 1},
            id="a group straddles the processes",
            marks=pytest.mark.e2e,
        ),
        pytest.param(
            {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, **EVERYTHING},
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, **EVERYTHING},
            id="dynamic sampling, entropy mask and bonus, evaluation",
        ),
    ],
)
def test_two_processes_train_to_the_result_of_one(
    values: dict[str, Any], tmp_path: Path, alone: dict[str, Any], both: dict[str, Any]
) -> None:
    values["rewards"] = [{"function": "tests.grpo_core.training.test_loop:brevity"}]
    values = with_keys(values, **CALM_ADAM)
    one = trained_run(tmp_path / "one", values, **alone)
    two = make_run(tmp_path / "two", with_keys(values, **both, num_processes=2))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    in_processes(2, tmp_path / "both", lambda _: train(two, two / "training"), port)
    assert are_close(one, two)
    for name in ("reward", "logged/brevity/length", "eval_reward", "eval_logged/brevity/length"):
        figures = [[step[name] for step in metrics_of(run) if name in step] for run in (one, two)]
        assert bool(figures[0]) == (not name.startswith("eval_") or "eval_steps" in both)
        assert figures[0] == pytest.approx(figures[1], abs=1e-6)
    assert [s["loss"] for s in metrics_of(one)] == pytest.approx([s["loss"] for s in metrics_of(two)], abs=1e-4)


def brevity(completion_ids: list[list[int]], log_metric: Callable[[str, float], None]) -> list[float]:
    log_metric("length", sum(map(len, completion_ids)) / len(completion_ids))
    return [-float(len(ids)) for ids in completion_ids]


def test_another_number_of_processes_than_planned_is_refused(values: dict[str, Any], tmp_path: Path) -> None:
    values["train"]["num_processes"] = 2
    with pytest.raises(TrainingError, match="num_processes=2, but 1 were started"):
        train(make_run(tmp_path / "run", values), tmp_path / "run" / "training")


def test_a_loss_that_is_not_finite_stops_before_the_step_is_taken(values: dict[str, Any], tmp_path: Path) -> None:
    values["rewards"] = [{"function": "tests.grpo_core.training.test_loop:huge", "weight": 1e290}]
    with pytest.raises(TrainingError, match=r"step 1: loss .* an update was too large"):
        trained_run(tmp_path / "run", values, scale_rewards="none", save_steps=1)
    [broken] = metrics_of(tmp_path / "run")
    assert broken["step"] == 1 and math.isnan(broken["loss"]), "the figures that stopped it are there to be looked at"
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def huge(completion_ids: list[list[int]]) -> list[float | None]:
    return [1e10 * ids[0] for ids in completion_ids]


def test_a_model_that_an_update_broke_is_not_sampled_from(values: dict[str, Any], tmp_path: Path) -> None:
    values["rewards"] = [{"function": "length", "args": {"target": 3}}]
    with pytest.raises(TrainingError, match="the policy's log-probabilities are not finite"):
        trained_run(tmp_path / "run", values, learning_rate=1e30, max_steps=10)


def test_a_reward_that_is_not_finite_stops_the_training_by_name(values: dict[str, Any], tmp_path: Path) -> None:
    values["rewards"] = [{"function": "tests.grpo_core.training.test_loop:undefined"}]
    with pytest.raises(RewardError, match="reward 'undefined' returned nan for prompt"):
        trained_run(tmp_path / "run", values)


def undefined(completions: list[str]) -> list[float | None]:
    return [float("nan")] * len(completions)
