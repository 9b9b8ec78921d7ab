"""What a training sets up before its first rollout: time limits, the optimizer's memory, weights in their precision."""

from __future__ import annotations

import json
import re
import shutil
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedType
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.config.base import LONGEST_SECONDS
from grpo_core.config.files import parse_config
from grpo_core.errors import ConfigError, TrainingError
from grpo_core.rollout import loading
from grpo_core.rollout.waiting import longest_wait
from grpo_core.training.optimizer import AdamW8bit
from grpo_core.training.session import load_session
from tests.conftest import config_values, make_run, with_keys

SECONDS = st.floats(0.1, LONGEST_SECONDS)


@given(
    st.lists(SECONDS, min_size=1, max_size=4),
    SECONDS,
    SECONDS,
    st.sampled_from(["vllm-server", "transformers"]),
    st.none() | SECONDS,
)
def test_processes_wait_longer_for_each_other_than_all_that_is_configured_takes_in_a_row(
    rewards: list[float], up: float, answer: float, engine: str, conversation: float | None
) -> None:
    values = config_values(
        Path("model"), Path("data"), engine=engine, vllm_server_timeout=up, vllm_request_timeout=answer
    )
    values["rewards"] = [
        {"function": "length", "name": f"r{i}", "args": {"target": 3}, "timeout": timeout}
        for i, timeout in enumerate(rewards)
    ]
    if conversation:
        values["environment"] = {"tools": ["calculator"], "conversation_timeout": conversation}
    limit = longest_wait(parse_config(values)).total_seconds()
    servers = up + 2 * answer if engine == "vllm-server" else 0.0  # it comes back, takes weights and answers
    assert limit > sum(rewards) + max(rewards) + servers + (conversation or 0) + 600  # which NCCL allows by itself


def test_the_processes_of_a_training_wait_that_long(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        pass

    def start(limit: timedelta, **_: bool) -> None:
        raise Asked(limit)

    run = make_run(tmp_path / "run", values)
    monkeypatch.setattr(loading, "start_processes", start)
    with pytest.raises(Asked) as asked:
        load_session(run)
    assert asked.value.args == (longest_wait(parse_config(values)),)


@pytest.mark.parametrize("kind", [DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM])
def test_an_accelerate_that_would_shard_is_refused(
    kind: DistributedType, values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = SimpleNamespace(distributed_type=kind, device=torch.device("cpu"))
    monkeypatch.setattr(loading, "start_processes", lambda *_, **__: started)
    with pytest.raises(TrainingError, match=rf"configured for {kind.value}, .* `torchrun`"):
        load_session(make_run(tmp_path / "run", values))


def test_too_little_memory_for_the_optimizer_ends_the_training_before_its_first_rollout(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB")

    monkeypatch.setattr(AdamW8bit, "step", step)
    expected = r"before the first step: .*offload.*use_peft.*gpu_memory_utilization.*\(CUDA out of memory. Tried"
    with pytest.raises(TrainingError, match=expected) as caught:
        load_session(make_run(tmp_path / "run", with_keys(values, optim="adamw_8bit")))
    assert "adamw_8bit" not in str(caught.value), "it is set already"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "trained", "frozen"),
    [
        ({}, {torch.float32}, set()),
        ({"use_peft": True}, {torch.float32}, {torch.float32}),
        ({"mixed_precision": "bf16"}, {torch.float32}, set()),
        ({"mixed_precision": "bf16", "use_peft": True}, {torch.float32}, {torch.bfloat16}),
    ],
)
def test_what_trains_is_float32_and_what_is_frozen_is_held_once_in_the_precision_of_the_passes(
    keys: dict[str, Any], trained: set[torch.dtype], frozen: set[torch.dtype], values: dict[str, Any], tmp_path: Path
) -> None:
    session = load_session(make_run(tmp_path / "run", with_keys(values, **keys)))
    pairs = [*zip(session.model.parameters(), session.policy.model.parameters(), strict=True)]
    assert {own.dtype for own, _ in pairs if own.requires_grad} == trained
    assert {own.dtype for own, _ in pairs if not own.requires_grad} == frozen
    assert all(own is used for own, used in pairs if not own.requires_grad)


@pytest.mark.parametrize(("moves", "masters"), [(False, torch.bfloat16), (True, torch.float32)])
def test_a_reference_has_float32_masters_only_if_it_follows_the_policy(
    moves: bool, masters: torch.dtype, values: dict[str, Any], tmp_path: Path
) -> None:
    keys = {"mixed_precision": "bf16", "beta": 0.1, "sync_ref_model": moves}
    reference = load_session(make_run(tmp_path / "run", with_keys(values, **keys))).reference
    assert reference is not None
    assert {parameter.dtype for parameter in reference.master.parameters()} == {masters}
    assert {parameter.dtype for parameter in reference.model.parameters()} == {torch.bfloat16}
    assert (reference.model is reference.master) == (not moves)


def test_a_teacher_must_read_what_is_trained_and_no_longer_evaluation(
    values: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    teacher = shutil.copytree(model_folder, tmp_path / "teacher")
    said = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps({**said, "max_position_embeddings": 24}))
    values = with_keys(values, eval_steps=1) | {"teacher": {"model": str(teacher)}}
    values["evaluation"] = {**values.get("evaluation", {}), "max_completion_length": 40}
    assert load_session(make_run(tmp_path / "run", values)).teachers
    refused = re.escape(f"teacher.model = {str(teacher)!r}: it takes 24 tokens, and the longest prompt plus completion")
    with pytest.raises(ConfigError, match=refused):
        load_session(make_run(tmp_path / "long", with_keys(values, max_completion_length=30)))


def test_a_divergence_names_the_adapter_on_the_output_layer(
    values: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    values = with_keys(values, use_peft=True, lora_target_modules=["q_proj", "lm_head"])
    values["teacher"] = {"model": str(model_folder), "divergence_beta": 0.5}
    with pytest.raises(ConfigError, match=r"if one of model\.lora_target_modules is the output layer, name that in"):
        load_session(make_run(tmp_path / "run", values))
    whole = with_keys(values, lora_target_modules=["q_proj"], lora_modules_to_save=["lm_head"])
    assert load_session(make_run(tmp_path / "whole", whole)).teachers
