"""What differs for this project between the releases of torch that pyproject.toml allows. torch is not imported.

`make gpu-emulated` runs with the oldest, `make test` with that of requirements/cpu.txt.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

RELEASE = tuple(int(part) for part in version("torch").split(".")[:2])

# What lets several query heads of varlen_attn share a key head, as 2.11 does unasked.
SHARED_KEYS: dict[str, Any] = {"enable_gqa": True} if RELEASE >= (2, 12) else {}

# Settings of the CUDA allocator by which page-locked memory is not rounded up to a power of two, as 2.12 always does.
EXACT_PINNED_MEMORY = ["pinned_max_round_threshold_mb:1"] if RELEASE >= (2, 13) else []

# Collectives of torch.distributed by which FSDP2 gathers weights and sums gradients.
GATHER, REDUCE = (
    ("all_gather_single", "reduce_scatter_single")
    if RELEASE >= (2, 13)
    else ("all_gather_into_tensor", "reduce_scatter_tensor")
)


def leave_forward(root: Any) -> None:
    """Let a model sharded by FSDP2 forget a forward pass that an exception has ended: each weight is a shard again, and
    the next pass begins anew."""
    if RELEASE >= (2, 13):
        root.reset_iter_state()
        return
    groups = (module._get_fsdp_state()._fsdp_param_group for module in root.modules() if hasattr(module, "reshard"))
    for group in filter(None, groups):
        group._training_state = type(group._training_state).IDLE
        group._post_forward_indices.clear()
        group.reshard()
    state = root._get_fsdp_state()
    state._comm_ctx.post_forward_order.clear()
    state._state_ctx.iter_forward_root = None
