"""vLLM whose processes sleep while they wait for each other: they would spin for a second after each message."""

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

SpinCondition.__init__.__defaults__ = (0.0,)  # busy_loop_s
