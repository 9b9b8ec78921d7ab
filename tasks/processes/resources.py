"""What a stage takes before its processes start: slots and GPUs, and the vLLM servers on which it samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from logging import Logger, LoggerAdapter
from typing import Any

from tasks.processes.slots import hold_gpus
from tasks.processes.vllm_servers import servers
from tasks.stages.run import Context


@contextmanager
def gpus_and_servers(
    context: Context, log: Logger | LoggerAdapter[Any], is_training: bool = False
) -> Iterator[dict[str, str]]:
    """Hold the GPUs of a stage and start its vLLM servers, which get those after its processes'. Gives the environment
    variables by which the processes find the servers.

    `context.config` has as many processes as the stage starts: both the GPUs and the servers' places follow from it.
    """
    with hold_gpus(context.config, is_training), servers(context, log) as addresses:
        yield addresses
