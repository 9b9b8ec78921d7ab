"""GPUs of a training and of the vLLM servers that it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_core.config.files import parse_config
from grpo_core.errors import ConfigError
from grpo_core.planning.forecast import forecast, forecast_rows
from grpo_core.planning.hardware import Gpu
from grpo_core.planning.plan import make_plan, plan_inputs
from grpo_core.planning.shapes import PromptLengths
from tests.conftest import config_values, with_keys

SIX_FOR_TWO = {"num_processes": 2, "vllm_num_servers": 2, "vllm_tensor_parallel_size": 3}


def _rows(gpu: Gpu | None, hosts: list[str], **keys: Any) -> dict[str, tuple[str, str]]:
    values = with_keys(config_values(Path("no-model"), Path("data"), engine="vllm-server"), **keys)
    config = parse_config(values | {"launch": {"server_hosts": hosts}})
    plan = make_plan(plan_inputs(config, 1000))
    found = forecast(config, plan, PromptLengths(8, 8, "given"), None, [], gpu)
    return {title: (value, how) for title, value, how in forecast_rows(found)}


def test_a_plan_counts_the_gpus_of_servers_and_says_where_they_are() -> None:
    value, how = _rows(Gpu("H100", 80.0, per_machine=8), [], **SIX_FOR_TWO)["GPUs"]
    assert value == "2 for the training, 6 for vLLM servers"
    assert how.startswith("rollout.vllm_num_servers=2 with 3 each")
    assert how.endswith("on this machine, after the training's")
    value, how = _rows(Gpu("H100", 80.0, per_machine=2), ["a", "b", "c"], **SIX_FOR_TWO)["GPUs"]
    assert value == "2 for the training, 6 for vLLM servers"
    assert how.endswith("on the first of a, b, c that answer")


def test_servers_that_this_machine_has_no_gpus_for_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"need 8 GPUs, and this machine has 7: .* launch\.server_hosts"):
        _rows(Gpu("H100", 80.0, per_machine=7), [], **SIX_FOR_TWO)


@pytest.mark.parametrize(
    "keys",
    [{"engine": "vllm"}, {"vllm_weight_transfer": "ipc"}, {"vllm_server_base_urls": ["http://10.0.0.5:8000"]}],
)
def test_servers_that_take_no_gpus_of_their_own_are_not_counted(keys: dict[str, Any]) -> None:
    assert "GPUs" not in _rows(Gpu("H100", 80.0, per_machine=1), [], **keys)
