"""Runs `grpo_core.train` with further options of vLLM's:  python -m benchmarks.gpu.with_vllm_options RUN

GPU_CHECK_VLLM is JSON with arguments of `vllm.LLM` that no key of the configuration has: a cache of a fixed size, so
that several engines share a GPU; no torch.compile, under a torch that vLLM was not built for.
"""

from __future__ import annotations

import json
import os
from typing import Any
from unittest import mock

from grpo_core.system.processes import run_and_leave
from grpo_core.train import main

OPTIONS: dict[str, Any] = json.loads(os.environ.get("GPU_CHECK_VLLM") or "{}")


def with_options() -> Any:
    """Patch `vllm.LLM` to take the options."""
    from vllm import LLM

    init = LLM.__init__
    return mock.patch.object(LLM, "__init__", lambda self, *args, **keys: init(self, *args, **{**keys, **OPTIONS}))


def _main() -> None:
    with with_options():
        main()


if __name__ == "__main__":
    run_and_leave(_main)
