"""A training in a forked child, so that the imports are paid once; a kill is a SIGKILL that the child sends itself."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
        except Exception:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def end(signal_number: int = signal.SIGKILL) -> None:
    """Send this process the signal."""
    os.kill(os.getpid(), signal_number)


def train(run: Path, at: int = 0, strike: Callable[[], None] = end, options: Sequence[str] = ()) -> int:
    """Train in a child that does this as its forward pass `at` begins; RUN/passes counts the passes. `options`: of the
    process."""

    def work() -> None:
        from grpo_core.model.policy import Policy
        from grpo_core.train import main as train_process

        forward, count = Policy.forward, 0

        def counted(self: Policy, *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == at:
                strike()
            return forward(self, *args, **kwargs)

        Policy.forward = counted  # type: ignore[method-assign]
        sys.argv = ["grpo_core.train", str(run), *options]
        train_process()
        (run / "passes").write_text(str(count))

    return in_child(work)
