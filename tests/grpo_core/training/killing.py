"""Run as a process: one training undisturbed, then again and again killed at a forward pass and resumed.

Each training is a forked child, so that the imports are paid once; a kill is a SIGKILL that the child sends itself.
`python -m tests.grpo_core.training.killing VALUES_JSON FOLDER KILLS` prints how many forward passes the training has
and the one of each kill.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conftest import make_run

NUMBER_OF_PROMPTS = 13


def in_child(work: Callable[[], None]) -> int:
    """The wait status of a forked child that does the work and ends."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def train(run: Path, kill_at: int = 0, signal_number: int = signal.SIGKILL) -> int:
    """Train in a child that gets the signal as its forward pass `kill_at` begins; RUN/passes counts the passes."""

    def work() -> None:
        from grpo_core.model.policy import Policy
        from grpo_core.train import main as train_process

        forward, count = Policy.forward, 0

        def counted(self: Policy, *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal_number)
            return forward(self, *args, **kwargs)

        Policy.forward = counted  # type: ignore[method-assign]
        sys.argv = ["grpo_core.train", str(run)]
        train_process()
        (run / "passes").write_text(str(count))

    return in_child(work)


def main() -> None:
    import grpo_core.training.loop  # noqa: F401  before any child, for all of them

    values, folder, kills = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), int(sys.argv[3])
    whole = make_run(folder / "whole", values, NUMBER_OF_PROMPTS)
    assert train(whole) == 0
    passes = int((whole / "passes").read_text())
    print(f"passes {passes}")
    for position in range(kills):
        kill_at = 1 + position * passes // kills + position % 2
        run = make_run(folder / f"killed-at-{kill_at}", values, NUMBER_OF_PROMPTS)
        assert os.WTERMSIG(train(run, kill_at)) == signal.SIGKILL
        assert train(run) == 0
        print(f"killed {kill_at}", flush=True)


if __name__ == "__main__":
    main()
