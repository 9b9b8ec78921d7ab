"""What two processes (gloo) say to each other: over which group, how long they wait, the mean of their gradients."""

from __future__ import annotations

import os
import random
import resource
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import PartialState
from torch import Tensor
from torch import distributed as dist
from torch.distributed import distributed_c10d

from grpo_core import distributed
from grpo_core.errors import EngineError, TrainingError
from tests.grpo_core.training.several import WORLD, in_processes, in_two_processes
from tests.held import held
from tests.serving import free_ports

LIMIT = timedelta(seconds=60)
BRIEF = timedelta(milliseconds=50)


def _recorded(names: list[str], calls: list[tuple[str, Any]]) -> Any:
    """Patch torch's collectives to note the group that each was called with."""

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append((name, options.get("group")))
            return function(*args, **options)

        return call

    return mock.patch.multiple(dist, **{name: noting(name, getattr(dist, name)) for name in names})


@pytest.mark.slow
def test_control_messages_wait_in_a_group_of_their_own_beside_the_tensors(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        calls: list[tuple[str, Any]] = []
        with mock.patch.object(dist, "get_backend", return_value="nccl"):  # as on GPUs
            distributed.start_processes(LIMIT)
        tensors, control = dist.group.WORLD, distributed._control
        assert tensors is not None and control is not None and control is not tensors
        assert dist.get_backend(control) == "gloo"
        with _recorded(["barrier", "broadcast_object_list", "all_gather_object", "all_reduce"], calls):
            assert distributed.sum_over_processes(torch.tensor([1.0 + rank])).tolist() == [3.0]
            assert distributed.maxima_over_processes(torch.tensor([1.0, -rank])).tolist() == [1.0, 0.0]
            parameter = torch.nn.Parameter(torch.zeros(3))
            parameter.grad = torch.full((3,), float(rank))
            distributed.average_gradients([parameter])
            assert parameter.grad.tolist() == [0.5] * 3
            over_gloo = [group for _, group in calls if group not in (None, tensors)]
            assert over_gloo == [control], "only the question which parameters have a gradient"

            distributed_c10d._set_pg_timeout(BRIEF, tensors)
            calls.clear()
            for ask, answer in (
                (lambda: distributed.wait_for_all(), None),
                (lambda: distributed.from_main(f"by {rank}"), "by 0"),
                (lambda: distributed.gathered([rank] * (rank + 1)), [0, 1, 1]),
                (lambda: distributed.any_process(rank == 1), True),
                (lambda: distributed.any_process(False), False),
            ):
                if rank == 1:
                    threading.Event().wait(3 * BRIEF.total_seconds())  # longer than the tensors' group allows
                assert ask() == answer
            assert [group for _, group in calls] == [control] * 5
        if rank == 0:  # the other one does not come
            with pytest.raises(RuntimeError, match=r"[Tt]imed out|timeout"):
                dist.all_reduce(torch.zeros(1))
        distributed.wait_for_all()

    in_two_processes(tmp_path, work)


def test_without_gpus_one_group_is_enough_and_may_open_more_files_than_the_shell_allows(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        allowed = sum(1 for _ in Path("/proc/self/fd").iterdir()) + 2
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        distributed.start_processes(LIMIT)
        assert distributed._control is None
        assert distributed.gathered([rank]) == [0, 1]

    in_processes(WORLD, tmp_path, work, *free_ports(1))


def test_the_limit_is_that_of_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def accelerator(**options: Any) -> Any:
        made.append(options)
        return SimpleNamespace(num_processes=1, device=torch.device("cpu"))

    monkeypatch.setattr(distributed, "Accelerator", accelerator)
    distributed.start_processes(timedelta(hours=7))
    [handler] = made[0]["kwargs_handlers"]
    assert handler.to_kwargs()["timeout"] == timedelta(hours=7)


def test_the_limit_is_that_of_a_machine_s_processes_and_of_their_counterparts_too(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        distributed.start_processes(LIMIT)
        with held(os.environ, {"LOCAL_WORLD_SIZE": "1"}):  # as if each process had a machine to itself
            mesh = distributed.shard_mesh(within_machine=True)
        assert mesh.mesh.tolist() == [[0], [1]]
        for name, members in {"copy": [0, 1], "share": [rank]}.items():
            group = mesh.get_group(name)
            assert dist.get_process_group_ranks(group) == members
            assert group._get_backend(torch.device("cpu")).options._timeout == LIMIT

    in_two_processes(tmp_path, work)


def _drawn(seed: int) -> tuple[list[Tensor], list[list[Tensor | None]]]:
    """Parameters, some not contiguous, and the gradients of each process; some have none, a few on no process."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    parameters: list[Tensor] = []
    for _ in range(draw.randint(1, 12)):
        shape = [draw.randint(1, 6) for _ in range(draw.randint(0, 3))]
        parameter = torch.zeros(shape)
        parameters.append(parameter.transpose(0, 1) if len(shape) > 1 and draw.random() < 0.5 else parameter)
    has = [[draw.random() < 0.7 for _ in parameters] for _ in range(WORLD)]
    gradients = [
        [torch.randn(p.shape, generator=generator) if there else None for p, there in zip(parameters, own, strict=True)]
        for own in has
    ]
    return parameters, gradients


@pytest.mark.slow
def test_gradients_become_their_mean_the_large_ones_in_place(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        PartialState(cpu=True)
        for seed in range(20):
            parameters, gradients = _drawn(seed)
            for parameter, gradient in zip(parameters, gradients[rank], strict=True):
                parameter.grad = None if gradient is None else gradient.clone()
            before = [parameter.grad for parameter in parameters]
            with mock.patch.object(distributed, "LARGE", 12):
                distributed.average_gradients(parameters)
            for number, parameter in enumerate(parameters):
                found = [own[number] for own in gradients]
                if all(gradient is None for gradient in found):
                    assert parameter.grad is None
                    continue
                mean = sum(gradient / WORLD for gradient in found if gradient is not None)
                assert parameter.grad is not None and torch.equal(parameter.grad, mean), (seed, number)
                if (own := before[number]) is not None and own.is_contiguous():
                    assert parameter.grad is own

    in_two_processes(tmp_path, work)


def test_rows_of_processes_are_put_together_a_few_at_a_time(tmp_path: Path) -> None:
    """Twelve rows of two figures, of which no process has the first, and one process has none at all."""

    def work(rank: int) -> None:
        rows, values, sums = [[], [11, 4, 5], [2, 7, 1, 10]][rank], torch.arange(2 * 12 * 3.0).view(2, 12, 3), []
        usual = distributed.reduce

        def noted(part: torch.Tensor, how: str) -> torch.Tensor:
            sums.append(part.numel())
            return usual(part, how)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(distributed, "SUMMED", 20)
            patch.setattr(distributed, "reduce", noted)
            found = distributed.rows_of_processes(values[:, rows], rows, 12)
        expected = torch.zeros_like(values)
        expected[:, [11, 4, 5, 2, 7, 1, 10]] = values[:, [11, 4, 5, 2, 7, 1, 10]]
        assert torch.equal(found, expected)
        assert max(sums) <= 20 and len(sums) == 4

    in_processes(3, tmp_path / "group", work)


def test_the_death_of_another_process_is_told_from_an_error_of_one_s_own(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        distributed.start_processes(LIMIT)
        distributed.wait_for_all()
        if rank == 1:
            os._exit(0)
        for ask in (lambda: distributed.gathered([rank]), lambda: distributed.sum_over_processes(torch.ones(3))):
            with pytest.raises(RuntimeError) as lost:
                ask()
            assert distributed.lost_peer(lost.value)
        wrapped = OSError("cannot be written")
        wrapped.__cause__ = lost.value
        assert distributed.lost_peer(wrapped)

    in_two_processes(tmp_path, work)
    assert not distributed.lost_peer(RuntimeError("shapes do not fit"))
    assert not distributed.lost_peer(ConnectionResetError("Connection reset by peer"))  # a reward's server


# As torch words NCCL's results (NCCLUtils.cpp), with what NCCL said last in reports of such failures.
NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, {}, NCCL version 2.28.9\n{}\nLast error:\n{}"
)
USAGE = (
    "invalid usage (run with NCCL_DEBUG=WARN for details)",
    "ncclInvalidUsage: This usually reflects invalid usage",
)
CUDA = ("unhandled cuda error (run with NCCL_DEBUG=INFO for details)", "ncclUnhandledCudaError: Call to CUDA function")
SYSTEM = ("unhandled system error (run with NCCL_DEBUG=INFO for details)", "ncclSystemError: System call (e.g. socket)")
REMOTE = ("remote process exited or there was a network error", "ncclRemoteError: A call failed possibly due to")
INTERNAL = ("internal error - please report this issue to the NCCL developers", "ncclInternalError: Internal check")
OWN = [
    (*USAGE, "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device ac000"),
    (*USAGE, "Mismatched NCCL version detected : rank 0 version 22809 rank 1 version 22703"),
    (*CUDA, "Cuda failure 2 'out of memory'"),
    (*CUDA, "Cuda failure 999 'unknown error'"),
    (*SYSTEM, "Error while creating shared memory segment /dev/shm/nccl-LeXlEJ (size 9637888)"),
]
LOST = [
    (*REMOTE, "socketProgressOpt: Call to recv from 10.0.0.2<33759> failed : Connection reset by peer"),
    (*SYSTEM, "socketStartConnect: Connect to 10.0.0.2<41237> failed : Connection refused"),
    (*INTERNAL, "Net : Connection closed by remote peer 10.0.0.2<50260>"),
]


@pytest.mark.parametrize(("words", "lost"), [*((words, False) for words in OWN), *((words, True) for words in LOST)])
def test_an_error_of_nccl_is_a_lost_process_only_if_one_may_be_lost(words: tuple[str, str, str], lost: bool) -> None:
    error = torch.distributed.DistBackendError(NCCL.format(*words))
    assert distributed.lost_peer(error) == lost
    wrapped = OSError("cannot be written")
    wrapped.__cause__ = error
    assert distributed.lost_peer(wrapped) == lost


def test_a_communicator_that_was_aborted_is_a_lost_process() -> None:
    assert distributed.lost_peer(torch.distributed.DistBackendError("NCCL communicator was aborted on rank 1."))
    assert distributed.lost_peer(torch.distributed.DistNetworkError("Connection reset by peer"))


WSL = RuntimeError("CUDA driver error: unknown error")


@pytest.mark.parametrize("allocator", ["expandable_segments:True", ""])
def test_a_first_allocation_that_fails_names_the_allocator_s_settings_if_there_are_any(
    allocator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", allocator)
    monkeypatch.setattr(torch.cuda, "synchronize", mock.Mock())
    monkeypatch.setattr(torch, "empty", mock.Mock(side_effect=WSL))
    distributed.try_allocator(torch.device("cpu"))
    if not allocator:
        distributed.try_allocator(torch.device("cuda"))  # torch's own error, wherever it comes first
        return
    with pytest.raises(TrainingError, match=r"unknown error.*CONF='expandable_segments:True'; WSL2 .* to nothing"):
        distributed.try_allocator(torch.device("cuda"))
    monkeypatch.setattr(torch, "empty", mock.Mock(side_effect=torch.OutOfMemoryError("others use it")))
    with pytest.raises(torch.OutOfMemoryError):
        distributed.try_allocator(torch.device("cuda"))
    busy = RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
    monkeypatch.setattr(torch.cuda, "synchronize", mock.Mock(side_effect=busy))
    with pytest.raises(RuntimeError, match=r"^CUDA error"):  # not the allocator's fault
        distributed.try_allocator(torch.device("cuda"))


def test_processes_try_the_allocator_when_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, device = mock.Mock(), torch.device("cuda")
    monkeypatch.setattr(distributed, "try_allocator", tried)
    monkeypatch.setattr(distributed, "Accelerator", lambda **_: SimpleNamespace(num_processes=1, device=device))
    monkeypatch.setattr(distributed, "_limit", None)
    distributed.start_processes(LIMIT)
    tried.assert_called_once_with(device)


@pytest.mark.slow
def test_an_error_of_one_process_is_raised_by_all_as_what_it_was(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        distributed.start_processes(LIMIT)
        for error in (EngineError("no server"), OSError("no space")):
            with pytest.raises(type(error), match=str(error)), distributed.failing_together(kind=type(error)):
                if rank:
                    raise error
        with pytest.raises(OSError, match="KeyError: 'x'") if rank == 0 else pytest.raises(KeyError):  # noqa: SIM117
            with distributed.failing_together():
                if rank:
                    raise KeyError("x")
        assert distributed.gathered([rank]) == [0, 1], "both are at the same place"

    in_two_processes(tmp_path, work)
