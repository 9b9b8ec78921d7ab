"""The pretended GPU sees what a GPU would refuse or wait for, and a training on it is one on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor

from grpo_core.training.session import load_session
from grpo_core.training.update import update
from tests.conftest import config_values, make_run
from tests.grpo_core.model.exactness import START, first_update, rollout_with
from tests.pretend_gpu import Gpu, pretend_gpu

MISMATCHES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sum": lambda there, here: there + here,
    "in place": lambda there, here: there.add_(here),
    "product": lambda there, here: here @ there,
    "concatenation": lambda there, here: torch.cat([there, here]),
    "selection": lambda there, here: there.index_select(0, here.long()),
    "index of another side": lambda there, here: here[there.long()],
    "output": lambda there, here: torch.add(there, there, out=here),
}
WAITS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "item": lambda there, here: there[0].item(),
    "truth": lambda there, here: bool((there > 0).all()),
    "number": lambda there, here: float(there.sum()),
    "list": lambda there, here: there.tolist(),
    "to the CPU": lambda there, here: there.cpu(),
    "from pageable memory": lambda there, here: here.to("cuda"),
    "from pageable memory, in vain non-blocking": lambda there, here: here.to("cuda", non_blocking=True),
    "from pinned memory, blocking": lambda there, here: here.pin_memory().to("cuda"),
    "new from a list": lambda there, here: torch.tensor([1.0], device="cuda"),
    "copied into": lambda there, here: there.copy_(here),
    "nonzero": lambda there, here: there.nonzero(),
    "mask": lambda there, here: there[there > 0],
    "mask written": lambda there, here: there.__setitem__(there > 0, there[:1].clone()),
    "index on the CPU": lambda there, here: there[here.long()],
    "repeated": lambda there, here: there.repeat_interleave(there.long()),
    "different ones": lambda there, here: there.unique(),
    "compared": lambda there, here: there.equal(there.clone()),
}
FREE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "number of the CPU": lambda there, here: there * here.sum() + 1,
    "from pinned memory": lambda there, here: here.pin_memory().to("cuda", non_blocking=True) + there,
    "made there": lambda there, here: torch.arange(2, device="cuda") + torch.zeros(2, device=there.device) + there,
    "made like it": lambda there, here: torch.zeros_like(there) + there.new_ones(2) + there,
    "another dtype": lambda there, here: there.to(torch.bfloat16).float() + there,
    "index there": lambda there, here: there[there.long()] + there,
    "written where": lambda there, here: there.__setitem__(there > 0, 0.0),
    "repeated to a size": lambda there, here: there.repeat_interleave(there.long(), output_size=1),
    "view": lambda there, here: there.view(2, 1)[:, 0].detach().data + there,
    "made like it on the CPU": lambda there, here: torch.empty_like(there, device="cpu", pin_memory=True) + here,
    "back when it is ready": lambda there, here: there.to("cpu", non_blocking=True),
}


def _on_both_sides(gpu: Gpu) -> tuple[Tensor, Tensor]:
    there = torch.arange(2.0, device="cuda")
    assert (there.device, there.is_cuda, type(there).__name__) == (torch.device("cuda:0"), True, "DeviceTensor")
    gpu.waits.clear()
    return there, torch.arange(2.0)


@pytest.mark.parametrize("operation", MISMATCHES.values(), ids=MISMATCHES)
def test_a_planted_mismatch_is_raised_and_recorded(operation: Callable[..., Any]) -> None:
    with pretend_gpu() as gpu:
        with pytest.raises(RuntimeError, match=r"on the same device: .* at tests/grpo_core/test_pretend_gpu\.py"):
            operation(*_on_both_sides(gpu))
        assert len(gpu.mismatches) == 1


@pytest.mark.parametrize("operation", WAITS.values(), ids=WAITS)
def test_a_planted_wait_is_recorded_with_its_place(operation: Callable[..., Any]) -> None:
    with pretend_gpu() as gpu:
        operation(*_on_both_sides(gpu))
        assert gpu.waits
        assert all(" at tests/grpo_core/test_pretend_gpu.py" in wait for wait in gpu.waits)
        assert not gpu.mismatches


@pytest.mark.parametrize("operation", FREE.values(), ids=FREE)
def test_work_that_stays_on_the_device_is_no_wait(operation: Callable[..., Any]) -> None:
    with pretend_gpu() as gpu:
        operation(*_on_both_sides(gpu))
        assert not gpu.waits
        assert not gpu.mismatches


def _trained(run: Path, values: dict[str, Any], kind: str) -> tuple[list[dict[str, float]], list[Tensor]]:
    """Metrics of two updates from one rollout, and the weights after them."""
    make_run(run, values)
    session = load_session(run)
    assert session.policy.packs
    assert session.policy.attention == kind
    torch.manual_seed(0)
    rollout = rollout_with(session, torch.randn(session.plan.generation_batch_size))
    batch = first_update(session, rollout)
    metrics = [update(session, batch, START) for _ in range(2)]
    weights = [parameter.detach().cpu().clone() for parameter in session.model.parameters()]
    AcceleratorState._reset_state(reset_partial_state=True)
    return metrics, weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixed_precision", "use_peft"),
    [
        pytest.param("no", False, id="no-whole"),
        pytest.param("bf16", True, id="bf16-lora"),
        pytest.param("no", True, id="no-lora", marks=pytest.mark.e2e),
        pytest.param("bf16", False, id="bf16-whole", marks=pytest.mark.e2e),
    ],
)
def test_a_training_keeps_to_its_device_and_computes_what_a_cpu_does(
    smooth_model_folder: Path, tmp_path: Path, mixed_precision: str, use_peft: bool
) -> None:
    """Set-up, weight sync with its probe, sampling, old and reference log-probabilities, two updates by AdamW."""
    keys: dict[str, Any] = {"mixed_precision": mixed_precision, "beta": 0.1, "num_iterations": 2}
    keys |= {"use_peft": True, "lora_r": 4} if use_peft else {}
    values = config_values(smooth_model_folder, tmp_path, **keys)
    expected, expected_weights = _trained(tmp_path / "cpu", values, "padded")
    with pretend_gpu() as gpu:
        metrics, weights = _trained(tmp_path / "gpu", values, "flex" if mixed_precision == "no" else "varlen")
    assert not gpu.mismatches
    tolerance = 1e-4 if mixed_precision == "no" else 0.05
    for found, wanted in zip(metrics, expected, strict=True):
        assert found == pytest.approx(wanted, rel=tolerance, abs=tolerance)
    for found, wanted in zip(weights, expected_weights, strict=True):
        assert torch.allclose(found, wanted, atol=tolerance)
