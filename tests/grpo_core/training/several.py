"""Work in some forked processes that form a process group (gloo): the imports are there already."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, PartialState

WORLD = 2
HANGS = 300  # seconds after which a process ends and says where it is


def in_two_processes(folder: Path, work: Callable[[int], None]) -> None:
    in_processes(WORLD, folder, work)


def in_processes(count: int, folder: Path, work: Callable[[int], None], port: int | None = None) -> None:
    """Call work(rank) in each. Raises AssertionError with the tracebacks if one of them fails. With a port, they have
    the environment that a launcher gives, and form the group themselves."""
    statuses = exit_statuses(count, folder, work, port)
    problems = [path.read_text() for kind in ("problem", "hanging") for path in sorted(folder.glob(f"{kind}-*"))]
    assert statuses == [0] * count, "\n".join(problems)


def exit_statuses(count: int, folder: Path, work: Callable[[int], None], port: int | None = None) -> list[int]:
    """Call work(rank) in each; their exit statuses, -n for signal n. Their process group is noted in `folder`, which
    is another one for each call."""
    folder.mkdir(exist_ok=True)
    children = [_forked(rank, count, folder, work, port) for rank in range(count)]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _forked(rank: int, count: int, folder: Path, work: Callable[[int], None], port: int | None) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    hanging = (folder / f"hanging-{rank}").open("w")
    # By no thread: the one that pytest may have for it does not exist in a forked process, and would be waited for.
    faulthandler.register(signal.SIGALRM, hanging, chain=True)
    signal.alarm(HANGS)
    try:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        os.environ.update({name: str(value) for name, value in places.items()}, ACCELERATE_USE_CPU="true")
        AcceleratorState._reset_state(reset_partial_state=True)
        if port:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        else:
            group = {"init_method": f"file://{folder}/group", "timeout": timedelta(seconds=60)}
            torch.distributed.init_process_group("gloo", rank=rank, world_size=count, **group)
            PartialState(cpu=True)
        work(rank)
        code = 0
    except BaseException:
        (folder / f"problem-{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(code)
