"""One process of a training, sharded or not, that measures itself: memory, seconds per update, bytes sent.

    python -m benchmarks.side_sharding FOLDER RUN RESULTS TURNS [TOKENS]

`benchmarks.sharding` starts it, with the variables of a process group. FOLDER is a workload's, RUN a run directory; one
JSON file per process is written into RESULTS. The training has no engine but stored completions, so that only training
takes memory. Linux only.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist

from benchmarks.side_ours import stored
from grpo_core.data.order import Schedule
from grpo_core.rollout.collect import BatchRequest, collect
from grpo_core.rollout.types import Rollout
from grpo_core.system.torch_releases import GATHER, REDUCE
from grpo_core.training import session as sessions
from grpo_core.training.batch import update_batch
from grpo_core.training.roll_out import compute_logprobs
from grpo_core.training.state import TrainingState
from grpo_core.training.update import update

EVERY = 0.0005  # seconds between two readings while weights are loaded


def measured(folder: Path, run: Path, turns: int, tokens: int | None = None) -> dict[str, Any]:
    """Measure this process: bytes of anonymous memory in addition to those before, and seconds.

    `loading`: peak while the policy's weights were loaded; `held`: with weights and optimizer state, before the first
    update; `peak`: peak of all updates. `updates`, `scorings`: seconds of each of the `turns` after a first update.
    `sent`: bytes of an update that come from other processes, by kind. `tokens`: per pass, at most.
    """
    figures: dict[str, Any] = {"peak": 0, "updates": [], "scorings": []}
    load, engine = sessions.load_model, SimpleNamespace(generate=stored(folder), notes=[])

    def watched(*arguments: Any, **keys: Any) -> Any:
        with _most_anonymous() as readings:
            model = load(*arguments, **keys)
        figures["loading"] = max(readings) - readings[0]
        return model

    without_engine: dict[str, Any] = {"make_engine": lambda *_: engine, "probe_batch": lambda *_: ([[0]], [[0]])}
    before = _anonymous()
    with mock.patch.multiple(sessions, load_model=watched, **without_engine):
        session = sessions.load_session(run)
    figures["held"] = _anonymous() - before
    if tokens is not None:
        session.memory.tokens = tokens
    state = TrainingState(tokens_per_pass=session.memory.tokens)
    schedule = Schedule(session.plan, session.config.seed)
    generated, *_ = collect(BatchRequest(0, schedule, session.config, session.prompts, session.scoring, engine))
    rollout = Rollout(**vars(generated), old_logprobs=None, ref_logprobs=None, keep=None)
    batch = update_batch([(rollout, 0)], session.plan, session.config)
    all_of_them = torch.ones(len(generated.prompt_ids), dtype=torch.bool)

    def one_update() -> float:
        Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
        seconds = _seconds(update, session, batch, state)
        peak = _status("VmHWM") - _status("RssFile") - _status("RssShmem") - before
        figures["peak"] = max(figures["peak"], peak)
        return seconds

    with _counted() as sent:
        one_update()
    for _ in range(turns):
        scored = _seconds(compute_logprobs, session, session.policy, generated, all_of_them)
        figures["scorings"].append(scored)
        figures["updates"].append(one_update())
    parameters = sum(parameter.numel() for parameter in session.model.parameters())
    return figures | {"sent": dict(sent), "parameters": parameters}


def _seconds(work: Any, *arguments: Any) -> float:
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def _anonymous() -> int:
    """Bytes of memory except pages of files, such as a mapped checkpoint."""
    _, resident, of_files = Path("/proc/self/statm").read_text().split()[:3]
    return (int(resident) - int(of_files)) * resource.getpagesize()


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


@contextmanager
def _most_anonymous() -> Iterator[list[int]]:
    """Give a list into which a thread reads `_anonymous` during the block."""
    readings, ended = [_anonymous()], threading.Event()

    def read() -> None:
        while not ended.wait(EVERY):
            readings.append(_anonymous())

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield readings
    finally:
        ended.set()
        thread.join()
        readings.append(_anonymous())


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Count the bytes that this process exchanges with others in collectives of tensors during the block."""
    sent: Counter[str] = Counter()
    processes = dist.get_world_size() if dist.is_initialized() else 1
    # An all-reduce sends every byte twice: for the sum, and as the sum.
    times = {
        GATHER: ("gathered", 1),
        REDUCE: ("reduced", 1),
        "all_reduce": ("reduced", 2),
    }
    with ExitStack() as stack:
        for name, (kind, factor) in times.items():
            collective = getattr(dist, name)

            def counted(
                *args: Any, collective: Any = collective, kind: str = kind, factor: int = factor, **keys: Any
            ) -> Any:
                tensors = [it for it in (*args, *keys.values()) if isinstance(it, torch.Tensor)]
                sent[kind] += factor * max(it.nbytes for it in tensors) * (processes - 1) // processes
                return collective(*args, **keys)

            stack.enter_context(mock.patch.object(dist, name, counted))
        yield sent


if __name__ == "__main__":
    found = measured(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[4:]))
    Path(sys.argv[3], f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
