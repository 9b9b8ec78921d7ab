"""`train.deterministic`: what it needs, where it acts, and that nothing on the way lacks a deterministic kernel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor

from grpo_core import train as entry
from grpo_core.config.files import parse_config
from grpo_core.errors import TrainingError
from grpo_core.fingerprint import determining
from grpo_core.model import fused_logprobs
from grpo_core.training import loop
from grpo_core.training.roll_out import roll_out
from grpo_core.training.session import load_session
from grpo_core.training.update import update
from tests.conftest import config_values, make_run
from tests.grpo_core.model.exactness import START, first_update, rollout_with
from tests.pretend_gpu import pretend_gpu

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture(autouse=True)
def reset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(CUBLAS, "")  # so that it is restored
    monkeypatch.delenv(CUBLAS)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        *(({"engine": name}, f"rollout.engine='{name}': vLLM's kernels") for name in ("auto", "vllm", "vllm-server")),
        ({"torch_compile": True}, "deterministic=true with torch_compile=true"),
    ],
)
def test_what_is_not_repeated_bit_for_bit_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said):
        parse_config(config_values(Path("model"), Path("data"), deterministic=True, **keys))


def test_the_plan_names_the_cost_and_what_is_not_promised() -> None:
    def notes(**keys: Any) -> list[str]:
        return parse_config(config_values(Path("model"), Path("data"), **keys)).gpu_notes

    assert not notes()
    (alone,) = notes(deterministic=True)
    assert "an eighth" in alone and "not promised" not in alone
    (several,) = notes(deterministic=True, num_processes=2, use_peft=True, load_in_4bit=True)
    assert several.endswith("not promised for several processes (NCCL's sums), 4-bit weights (kernels of bitsandbytes)")


def test_a_training_may_be_continued_with_and_without_it() -> None:
    plain = config_values(Path("model"), Path("data"))
    repeated = config_values(Path("model"), Path("data"), deterministic=True)
    assert determining(parse_config(repeated)) == determining(parse_config(plain))


def test_a_workspace_of_cublas_that_repeats_nothing_is_refused(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CUBLAS, ":0:0")
    values["train"]["deterministic"] = True
    load_session(make_run(tmp_path / "on a CPU", values))  # which has no cuBLAS
    AcceleratorState._reset_state(reset_partial_state=True)
    with (
        pretend_gpu(),
        pytest.raises(TrainingError, match=r"CUBLAS_WORKSPACE_CONFIG=':0:0' .* only with :4096:8 or :16:8; set it so"),
    ):
        load_session(make_run(tmp_path / "run", values))


def test_on_a_cpu_it_changes_nothing(values: dict[str, Any], tmp_path: Path) -> None:
    values["train"]["deterministic"] = True
    load_session(make_run(tmp_path / "run", values))
    assert not torch.are_deterministic_algorithms_enabled()


PLANTED: dict[str, Callable[[Tensor], Any]] = {
    "histogram": lambda x: x.histc(2),
    "weighted counts": lambda x: torch.bincount(x.long(), x),
    "median and where": lambda x: x.median(0),
    "put": lambda x: x.put_(torch.zeros(1, dtype=torch.int64, device="cuda"), x[:1].clone()),
    "product": lambda x: x.scatter_reduce(0, x.long(), x, "prod"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_pretended_gpu_refuses_what_has_no_deterministic_kernel(name: str) -> None:
    with pretend_gpu():
        x = torch.arange(2.0, device="cuda")
        PLANTED[name](x.clone())
        torch.use_deterministic_algorithms(True)
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            PLANTED[name](x)


RUNS: dict[str, dict[str, Any]] = {
    "all weights": {"mixed_precision": "bf16", "beta": 0.1, "entropy_coef": 0.01, "top_p": 0.9, "top_k": 5},
    "float32": {"mixed_precision": "no", "use_adaptive_entropy": True, "repetition_penalty": 1.2, "stop": ["3"]},
    "LoRA": {
        "mixed_precision": "bf16",
        "use_peft": True,
        "lora_r": 2,
        "lora_dropout": 0.1,
        "beta": 0.1,
        "num_iterations": 2,
        "min_p": 0.1,
        "optim": "adamw_8bit",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all weights", *(pytest.param(each, marks=pytest.mark.e2e) for each in RUNS)])
def test_nothing_on_the_way_of_a_training_lacks_a_deterministic_kernel(
    name: str, smooth_model_folder: Path, tmp_path: Path
) -> None:
    """Set-up, weight sync with its probe, sampling, scoring, update, and the next update with what it has changed."""
    run = make_run(tmp_path / "run", config_values(smooth_model_folder, tmp_path, deterministic=True, **RUNS[name]))
    compiled = mock.Mock(wraps=fused_logprobs.compile_kernels)
    with pretend_gpu(), mock.patch.object(fused_logprobs, "compile_kernels", compiled):
        session = load_session(run)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        assert os.environ[CUBLAS] == ":4096:8"
        assert compiled.call_args.kwargs == {"entropy_gradient": session.config.algorithm.has_entropy_bonus}
        torch.manual_seed(0)
        batch = first_update(session, rollout_with(session, torch.randn(session.plan.generation_batch_size)))
        update(session, batch, START)
        roll_out(session, 1, START)


def test_an_operation_without_a_deterministic_kernel_ends_the_training_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("histc does not have a deterministic implementation, but you set 'torch.use_…'")
    monkeypatch.setattr(loop, "train", mock.Mock(side_effect=error))
    monkeypatch.setattr("sys.argv", ["train", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"train\.deterministic = true, but this model needs .*: histc does not"):
        entry.main()
