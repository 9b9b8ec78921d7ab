"""Servers that a stage starts: on which GPUs, and what is said when one does not come up."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_core.config import load_config, parse_config
from tasks.servers import _devices, servers
from tasks.stage import Context, StageError
from tests.conftest import config_values, make_run, with_keys


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    return config_values(tmp_path / "no-model", tmp_path, engine="vllm-server")


@pytest.mark.parametrize(
    ("visible", "keys", "expected"),
    [
        (None, {}, ["1"]),
        ("4,5,6,7", {"num_processes": 2, "vllm_num_servers": 2}, ["6", "7"]),
        (None, {"num_processes": 2, "vllm_num_servers": 2, "vllm_tensor_parallel_size": 3}, ["2,3,4", "5,6,7"]),
        (None, {"vllm_tensor_parallel_size": 2, "vllm_data_parallel_size": 2}, ["1,2,3,4"]),
        (None, {"vllm_weight_transfer": "ipc"}, ["0"]),
    ],
)
def test_servers_take_the_gpus_after_the_trainings_own(
    values: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    keys: dict[str, Any],
    expected: list[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = _devices(parse_config(with_keys(values, **keys)))
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in found] == expected


def test_too_few_gpus_are_refused_with_the_keys_that_ask_for_them(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(StageError, match=r"takes 2 GPUs and its 1 vLLM servers 4 each .* there are 4"):
        _devices(parse_config(with_keys(values, num_processes=2, vllm_tensor_parallel_size=4)))


@pytest.mark.e2e
def test_a_server_that_does_not_come_up_fails_the_stage_with_its_last_lines(
    values: dict[str, Any], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", values)
    context = Context(load_config(run / "config.toml"), run, run)
    with (
        pytest.raises(StageError, match=r"ended with status \d+ before it was up(.|\n)*no-model"),
        servers(context, logging.getLogger()),
    ):
        raise AssertionError("nothing is served")


def test_a_run_that_names_its_servers_or_needs_none_has_none_started(values: dict[str, Any], tmp_path: Path) -> None:
    named = with_keys(values, vllm_server_base_urls=["http://127.0.0.1:1"])
    for each in (named, with_keys(values, engine="transformers")):
        with servers(Context(parse_config(each), tmp_path, tmp_path), logging.getLogger()) as environment:
            assert environment == {}
