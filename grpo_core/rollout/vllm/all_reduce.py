"""Whether GPUs that share a model in vLLM can use vLLM's own all-reduce kernel."""

from __future__ import annotations

import os

from grpo_core.system.memory import ALLOCATOR


def custom_all_reduce_fails(gpus: int) -> bool:
    """True if vLLM's own all-reduce among this many GPUs would end the process while vLLM captures graphs: it exports
    what they read by CUDA IPC, which takes no memory of growing segments (vllm-project/vllm#42609). Then NCCL or
    FlashInfer sum; growing segments stay, since runs that share a model are short of memory."""
    return gpus > 1 and any("expandable_segments:True" in os.environ.get(name, "") for name in ALLOCATOR)
