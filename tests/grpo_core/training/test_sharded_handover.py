"""Engines have the weights of a sharded training after every update: vLLM on the CPU for real, two real processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import config_values, make_model, make_run, with_keys
from tests.grpo_core.rollout.vllm_engine import PACKED
from tests.grpo_core.training.launching import finish, processes, started
from tests.grpo_core.training.training import metrics_of
from tests.serving import free_ports, kill_group, policy_server

pytestmark = pytest.mark.e2e

SHARDED = {"sharding": "full", "num_processes": 2, "per_device_train_batch_size": 8, "max_steps": 3}
LORA = {"use_peft": True, "lora_r": 4}


def sharded_run(tmp_path: Path, engine: str, **keys: Any) -> Path:
    options = {"tie_word_embeddings": True, "initializer_range": 0.1, **PACKED}
    model = make_model(tmp_path / "model", num_key_value_heads=2, **options)
    values = with_keys(config_values(model, tmp_path, engine=engine), **{**SHARDED, **keys})
    values["rewards"] = [{"function": "tests.grpo_core.training.test_loop:parity"}]
    return make_run(tmp_path / "run", values)


def assert_in_step(run: Path, updates: int) -> None:
    """Each rollout was sampled by the policy that was trained, up to the rounding of float32."""
    steps = metrics_of(run)
    assert len(steps) == updates
    assert max(step["sampling/sync_drift"] for step in steps) < 1e-4
    assert max(step["sampling/sampling_logp_difference/max"] for step in steps) < 1e-4
    assert steps[0]["grad_norm"] > 0


@pytest.mark.parametrize(
    "keys",
    [{}, {"vllm_tensor_parallel_size": 2}, LORA],
    ids=["an engine each", "one engine together", "adapter"],
)
def test_vllm_in_the_processes_follows_a_sharded_training(tmp_path: Path, keys: dict[str, Any]) -> None:
    run = sharded_run(tmp_path, "vllm", **keys)
    with started(run, tmp_path, 0, *processes(2)) as process:
        finish(process)
    assert_in_step(run, 3)


@pytest.mark.parametrize("keys", [{}, LORA], ids=["whole model", "adapter"])
def test_a_server_follows_a_sharded_training_also_when_it_dies_and_comes_back(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    (port,) = free_ports(1)
    server = {"vllm_server_base_urls": [f"http://127.0.0.1:{port}"], "vllm_server_timeout": 600.0}
    run = sharded_run(tmp_path, "vllm-server", max_steps=60, **server, **keys)
    log = tmp_path / "server.log"
    with started(run, tmp_path, 0, *processes(2)) as process:
        with policy_server(run / "config.toml", port, log) as first:
            assert process.stdout
            steps = (re.search(r"step (\d+)/", line) for line in process.stdout)  # not every step has a line
            assert any(3 <= int(step[1]) < 60 for step in steps if step), "it is in the middle of its updates"
            kill_group(first)
        with policy_server(run / "config.toml", port, log):
            finish(process)
    assert_in_step(run, 60)
