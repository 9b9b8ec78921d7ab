"""Collectives of a training: how its processes exchange values. No other module calls one.

Every function is called by all processes, in the same order. With one process each of them is local. The main threads
call them; a thread that writes checkpoints calls only those that take a `group`, with the `writing_group`.

Tensors go over the backend of the device that holds them: NCCL on GPUs. Control messages (objects, flags, barriers) go
over gloo: a process that waits for one keeps no GPU busy, and NCCL's watchdog does not see the wait.

Each function reports that this process waits for others, so that a process that hangs can be told from those that wait.
"""

from __future__ import annotations

import functools
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import InitProcessGroupKwargs, gather, reduce
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from grpo_core.errors import GrpoError, TrainingError
from grpo_core.system.files import naming
from grpo_core.system.memory import ALLOCATOR
from grpo_core.system.progress import waiting

SUMMED = 2**24  # numbers that the device holds at a time while the rows of all processes are put together
LARGE = 2**20  # elements from which a gradient is sent by itself; smaller ones are sent together
# In NCCL's errors: faults of this machine or of the configuration, such as memory that runs out, two processes on one
# GPU, or different versions of NCCL. Its remote, system and internal errors follow from a process that is gone.
OWN_FAULTS = ("unhandled cuda error", "invalid usage", "invalid argument", "Error while creating shared memory segment")

WORKSPACE, REPEATING = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")  # cuBLAS's workspaces, by its documentation

T = TypeVar("T")

_control: dist.ProcessGroup | None = None  # for control messages; None: the group of all processes
_limit: timedelta | None = None  # longest wait for another process; None: torch's default


@waiting()
def start_processes(limit: timedelta, *, deterministic: bool = False) -> Accelerator:
    """Join the processes that the launcher has started. `limit`: a longer wait for another process is an error.

    `deterministic`: from now on, this process computes on a GPU with kernels that give the same bits each time. Raises
    TrainingError if the GPU cannot be used with the settings of PyTorch's allocator, or if those of cuBLAS do not give
    the same bits.
    """
    global _control, _limit
    _limit = limit
    if deterministic:
        os.environ.setdefault(WORKSPACE, REPEATING[0])  # read before the first product on a GPU
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Each other process, and each request to a server, has some open files here.
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=limit)])
    try_allocator(accelerator.device)
    if deterministic and accelerator.device.type == "cuda":
        if (given := os.environ[WORKSPACE]) not in REPEATING:
            raise TrainingError(
                f"{WORKSPACE}={given!r} with train.deterministic: products on a GPU give the same bits only with "
                f"{' or '.join(REPEATING)}; set it so, or unset it"
            )
        torch.use_deterministic_algorithms(True)
        # Nothing reads memory that it has not written; filling it would be one more pass over each result.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if accelerator.num_processes > 1 and dist.get_backend() != "gloo":
        _control = dist.new_group(backend="gloo", timeout=limit)
    return accelerator


def try_allocator(device: torch.device) -> None:
    """Make a first allocation on a GPU, so that one that fails because of the allocator's settings says so. Raises
    TrainingError."""
    settings = {name: os.environ[name] for name in sorted(ALLOCATOR) if os.environ.get(name)}
    if device.type != "cuda" or not settings:
        return
    torch.cuda.synchronize(device)  # what is wrong with the GPU itself is raised here
    try:
        torch.empty(1, device=device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        given = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        raise TrainingError(
            f"the first allocation on the GPU fails: {error}. PyTorch's allocator is set up by {given}; WSL2 and some "
            "virtual GPUs do not support expandable_segments: set PYTORCH_CUDA_ALLOC_CONF yourself, to nothing or to "
            "what works there, and start again"
        ) from error


def writing_group() -> dist.ProcessGroup | None:
    """Group in which the threads that write checkpoints talk to each other: in the main threads' group, their messages
    would mix with others. None with one process. The main threads call this."""
    return _writing_group() if PartialState().num_processes > 1 else None


@functools.cache
def _writing_group() -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=_limit)


def processes_per_machine() -> int:
    """Number of processes on each machine; their ranks are consecutive."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", PartialState().num_processes))


def lost_peer(error: BaseException) -> bool:
    """True if the error, or one that it comes from, is a failed communication: another process or the network is gone.

    NCCL and the store raise torch's DistError; gloo's RuntimeErrors name a file of its source.
    """
    found: BaseException | None = error
    while found is not None:
        text = str(found)
        if isinstance(found, dist.DistError) and "NCCL error" in text and any(fault in text for fault in OWN_FAULTS):
            return False
        if isinstance(found, dist.DistError) or (isinstance(found, RuntimeError) and "gloo/" in text):
            return True
        found = found.__cause__ or found.__context__
    return False


def own_range(count: int) -> range:
    """Range of the `count` items that this process handles; may be empty if there are more processes than items."""
    return range_of_process(count, PartialState().process_index, PartialState().num_processes)


def range_of_process(count: int, place: int, processes: int) -> range:
    """Range of the `count` items that process number `place` of `processes` handles."""
    return range(count * place // processes, count * (place + 1) // processes)


@waiting()
def wait_for_all() -> None:
    """Wait until every process has called this."""
    if PartialState().num_processes > 1:
        dist.barrier(group=_control)


@waiting()
def from_main(value: T) -> T:
    """Return the main process's value on every process."""
    values = [value]
    if PartialState().num_processes > 1:
        dist.broadcast_object_list(values, src=0, group=_control)
    return values[0]


def leave_word(name: str, word: str) -> None:
    """Leave a word of the main process in the processes' store, in place of its last one by this name. Any thread may
    call it, and it waits for no other process; so with `word_of_main`."""
    if PartialState().num_processes > 1:
        _store().set(name, word)


def word_of_main(name: str) -> str:
    """Return the main process's last word by this name; "" if there is none, or the store is gone with it."""
    with suppress(dist.DistError):
        if PartialState().num_processes > 1 and _store().check([name]):
            return _store().get(name).decode()
    return ""


def _store() -> dist.Store:
    return dist.PrefixStore("words", dist.distributed_c10d._get_default_store())


@waiting()
def gathered(items: list[T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the items of all processes, in the processes' order."""
    if PartialState().num_processes == 1:
        return items
    of_each: list[list[T]] = [[] for _ in range(PartialState().num_processes)]
    dist.all_gather_object(of_each, items, group=group or _control)
    return [item for of_one in of_each for item in of_one]


def gathered_in_block(items: list[T], processes: int) -> list[list[T]]:
    """Return the items of each process in this one's block; a block is `processes` processes with consecutive ranks."""
    first = PartialState().process_index // processes * processes
    return gathered([items])[first : first + processes]


def any_process(flag: bool) -> bool:
    """True if the flag is set on at least one process."""
    return bool(max_over_processes(int(flag)))


@waiting()
def max_over_processes(count: int) -> int:
    """Return the largest of the processes' counts."""
    found = torch.tensor(count)
    if PartialState().num_processes > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=_control)
    return int(found)


@functools.cache  # each mesh makes its own communicators
def shard_mesh(*, within_machine: bool) -> DeviceMesh:
    """Return the mesh of the processes that share one copy of a model: all of them, or those of each machine."""
    state = PartialState()
    if not within_machine:
        return init_device_mesh(state.device.type, (state.num_processes,), mesh_dim_names=("share",))
    numbers = torch.arange(state.num_processes).view(-1, processes_per_machine())  # a machine's processes in a row
    # Made here, since the groups of init_device_mesh have torch's own time limit.
    groups = [dist.new_subgroups_by_enumeration(each.tolist(), timeout=_limit)[0] for each in (numbers.T, numbers)]
    return DeviceMesh.from_group(groups, state.device.type, numbers, mesh_dim_names=("copy", "share"))


def gather_if_sharded(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_sharded_tensor(tensor: Tensor) -> bool:
    """True if each process has a shard of the tensor."""
    return isinstance(tensor, DTensor)


def shard_count(model: nn.Module) -> int:
    """Number of processes, with consecutive ranks, that share one copy of a sharded model."""
    return next(tensor.device_mesh.size(-1) for tensor in model.parameters() if isinstance(tensor, DTensor))


def shard_like(tensor: Tensor, values: Tensor) -> Tensor:
    """Shard values that every process has whole as the tensor is sharded; return them unchanged if it is not."""
    if isinstance(tensor, DTensor):
        return distribute_tensor(values.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)
    return values


def copy_into_shard(values: Tensor, tensor: Tensor) -> None:
    """Copy values that every process has whole into the tensor, or into this process's shard of it."""
    tensor.copy_(shard_like(tensor, values))


def own_shard(tensor: Tensor) -> Tensor:
    """Return this process's shard of the tensor; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_own_row(tensor: Any) -> int:
    """Return the number of the first row of this process's shard of a sharded tensor."""
    mesh = tensor.device_mesh
    return min(len(tensor), -(-len(tensor) // mesh.size(-1)) * mesh.get_local_rank("share"))  # as torch.chunk divides


def shard_suffix(tensor: Tensor) -> str:
    """Suffix that names this process's shard, alike in each copy of the model; "" if the tensor is not sharded."""
    return f".share-{tensor.device_mesh.get_local_rank('share')}" if isinstance(tensor, DTensor) else ""


def write_tensors(tensors: dict[str, Any], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write nested dicts of tensors into the existing folder: each process its own shards, and one of them what all
    have whole. Raises OSError, which names the folder, on every process if one cannot write."""
    with _one_error():
        # Without copying ahead, which waits for copies on the current device: here that is another process's.
        checkpoint.save(
            tensors, storage_writer=_Writer(folder, per_thread_copy_ahead=0), process_group=group or _control
        )


class _Writer(checkpoint.FileSystemWriter):
    """torch's file writer, which raises an OSError that can be sent to other processes if the disk is full."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        with naming(Path(self.path)):
            return super().write_data(plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        with naming(Path(self.path)):
            super().finish(metadata, results)


def read_tensors(tensors: dict[str, Any], folder: Path) -> None:
    """Fill the tensors, in place, with what `write_tensors` wrote, perhaps with another number of processes."""
    with _one_error():
        checkpoint.load(tensors, checkpoint_id=folder, process_group=_control, no_dist=not dist.is_initialized())


@contextmanager
def _one_error() -> Iterator[None]:
    """Raise one process's error in place of torch's collection: the OSError itself, or an OSError with its message."""
    try:
        yield
    except checkpoint.CheckpointException as failures:
        error = next(iter(failures.failures.values()))[0]
        raise (error if isinstance(error, OSError) else OSError(str(error))) from failures


@contextmanager
def failing_together(group: dist.ProcessGroup | None = None, kind: type[Exception] = Exception) -> Iterator[None]:
    """After the block, raise on every process an error of this kind that one of them had: a process's own error or, on
    the others, the OSError or GrpoError itself, or an OSError with its words. Errors of other kinds are raised in the
    block: say which kind where the other processes may wait in the block for the one that fails."""
    error = None
    try:
        yield
    except kind as caught:
        error = caught
    told = error
    if error is not None and not isinstance(error, OSError | GrpoError):
        told = OSError(f"{type(error).__name__}: {error}")
    errors = [found for found in gathered([told], group) if found]
    if errors:
        raise error or errors[0]


@waiting()
def sum_over_processes(values: Tensor) -> Tensor:
    """Return the sum over the processes, element by element."""
    return reduce(values, "sum")


@waiting()
def rows_of_processes(values: Tensor, rows: Sequence[int], count: int) -> Tensor:
    """Return the `count` rows that the processes have together, on the CPU; 0 where none has any. (…, count, T)

    `values`: this process's, (…, n, T); `rows`: their places, which no other process has. The device holds no more than
    SUMMED numbers of all rows at a time.
    """
    whole = torch.zeros(*values.shape[:-2], count, values.shape[-1], dtype=values.dtype)
    whole[..., rows, :] = values.cpu()
    if PartialState().num_processes == 1:
        return whole
    step = max(1, SUMMED * count // max(whole.numel(), 1))
    return torch.cat([reduce(part.to(values.device), "sum").cpu() for part in whole.split(step, -2)], -2)


@waiting()
def maxima_over_processes(values: Tensor) -> Tensor:
    """Return the maximum over the processes, element by element. (N,)"""
    return gather(values[None]).max(dim=0).values


@waiting()
@torch.no_grad()
def average_gradients(parameters: Sequence[Tensor]) -> None:
    """Replace each gradient by its mean over the processes, summed in its own precision. Those of sharded parameters
    are means already: the backward pass has left each shard's.

    A parameter that has a gradient on no process gets none, as with one process: the optimizer leaves it alone.
    Large gradients are summed where they are, all messages under way together; only small ones are copied into one.
    """
    processes = PartialState().num_processes
    if processes == 1:
        return
    parameters = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)  # known without the device
    dist.all_reduce(used, group=_control)
    trained = [parameter for parameter, count in zip(parameters, used.tolist(), strict=True) if count]
    for parameter in trained:
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = found.contiguous()  # messages have to be
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    if not gradients:
        return
    torch._foreach_div_(gradients, processes)
    small = [gradient for gradient in gradients if gradient.numel() < LARGE]
    messages = [gradient for gradient in gradients if gradient.numel() >= LARGE]
    if small:
        messages.append(torch.cat([gradient.flatten() for gradient in small]))
    for work in [dist.all_reduce(message, async_op=True) for message in messages]:
        work.wait()
    if small:
        means = messages[-1].split([gradient.numel() for gradient in small])
        torch._foreach_copy_(small, [mean.view_as(gradient) for mean, gradient in zip(means, small, strict=True)])


@waiting()
def clip_gradients(parameters: Sequence[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients so that their common norm is at most `max_norm`. Returns the norm before, on the device."""
    return gather_if_sharded(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
