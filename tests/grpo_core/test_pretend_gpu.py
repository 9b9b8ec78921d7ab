"""The pretended GPU sees what a GPU would refuse or wait for, and a training on it is one on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
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
    "number as an index": lambda there, here: there.index_select(0, here.sum().long()),
}
REFUSED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "device without an index": lambda there, here: torch.cuda.set_device(torch.device("cuda")),
    "another GPU chosen": lambda there, here: torch.cuda.set_device(1),
    "another GPU": lambda there, here: here.to("cuda:1"),
    "the CPU's generator": lambda there, here: torch.rand(2, device="cuda", generator=torch.Generator()),
    "the CPU's generator in place": lambda there, here: there.bernoulli_(generator=torch.Generator()),
    "page-locked memory of the device": lambda there, here: there.pin_memory(),
    "product of integers": lambda there, here: there.long() @ there.long(),
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
    "everything": lambda there, here: torch.cuda.synchronize(),
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


@pytest.mark.parametrize("operation", REFUSED.values(), ids=REFUSED)
def test_what_cuda_refuses_is_refused(operation: Callable[..., Any]) -> None:
    with pretend_gpu() as gpu:
        sides = _on_both_sides(gpu)
        with pytest.raises((RuntimeError, ValueError)):
            operation(*sides)


def test_accelerate_names_its_device_as_on_a_gpu() -> None:
    """Without an index for a process alone, and a tensor's device has one."""
    with pretend_gpu():
        device = Accelerator().device
        assert (str(device), str(torch.zeros(1, device=device).device)) == ("cuda", "cuda:0")
    with pretend_gpu(index=1, count=2):
        assert torch.cuda.device_count() == 2
        torch.cuda.set_device(1)
        assert str(torch.zeros(1, device="cuda").device) == "cuda:1"
        assert str(torch.zeros(1, device="cuda:1").device) == "cuda:1"
    assert not torch.cuda.is_available()


def test_random_numbers_of_the_device_are_its_own() -> None:
    with pretend_gpu():
        torch.manual_seed(0)
        of_cpu, of_gpu = torch.get_rng_state(), torch.cuda.get_rng_state_all()
        drawn = [torch.rand(2, device="cuda").tolist(), torch.zeros(2, device="cuda").normal_().tolist()]
        assert torch.get_rng_state().equal(of_cpu)
        torch.cuda.set_rng_state_all(of_gpu)
        assert [torch.rand(2, device="cuda").tolist(), torch.zeros(2, device="cuda").normal_().tolist()] == drawn


def test_a_copy_that_nobody_waits_for_is_made_later() -> None:
    with pretend_gpu() as gpu:
        source, place = torch.arange(4.0).pin_memory(), torch.zeros(4).pin_memory()
        there = source.to("cuda", non_blocking=True)
        back = place.copy_(there, non_blocking=True), there.to("cpu", non_blocking=True)
        assert not any(found.equal(source) for found in back)
        torch.cuda.synchronize()
        assert all(found.equal(source) for found in back)
        assert not gpu.races
        source.to("cuda", non_blocking=True)
        source.zero_()
        torch.cuda.synchronize()
        [race] = gpu.races
        assert "before its copy to the device was made, at tests/grpo_core/test_pretend_gpu.py" in race


def test_a_thread_knows_the_device_and_is_seen_if_it_has_not_chosen_it() -> None:
    device = torch.device("cuda", 1)

    def work(*, chooses: bool) -> list[str]:
        with pretend_gpu(index=1, count=2) as gpu:
            torch.cuda.set_device(device)
            mine, found = torch.ones(2, device=device), list[Tensor]()

            def add() -> None:
                if chooses:
                    torch.cuda.set_device(device)
                found.append((mine + torch.ones(2, device="cuda")).cpu())

            thread = threading.Thread(target=add, name="adding")
            thread.start()
            thread.join()
            assert found[0].tolist() == [2.0, 2.0]
            return gpu.strays

    assert not work(chooses=True)
    assert [stray.partition(" at ")[0] for stray in work(chooses=False)] == ["ones in thread adding"]


def test_what_a_backward_pass_makes_is_on_the_device() -> None:
    made = list[Tensor]()
    with pretend_gpu():
        weights = torch.ones(2, device="cuda", requires_grad=True)
        weights.register_hook(lambda gradient: made.append(torch.zeros(2, device=gradient.device)))
        weights.sum().backward()
        assert made[0].is_cuda


def test_a_tensor_of_the_device_is_saved_as_what_it_holds(tmp_path: Path) -> None:
    with pretend_gpu():
        torch.save({"weights": torch.arange(3.0, device="cuda")}, tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)["weights"]
    assert (type(saved), saved.tolist()) == (Tensor, [0.0, 1.0, 2.0])


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
