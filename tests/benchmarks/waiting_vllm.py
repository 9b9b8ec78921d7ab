"""vLLM whose processes sleep while they wait for each other, instead of spinning for a second after each message."""

from __future__ import annotations

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

MILLISECONDS = 5  # after which they look for a message again: they are told of it, but may connect too late for that


def wait(self: SpinCondition, timeout_ms: int | None = None) -> None:
    self.last_read = 0
    _wait(self, MILLISECONDS)


_wait, SpinCondition.wait = SpinCondition.wait, wait
