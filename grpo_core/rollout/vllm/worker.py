"""What a vLLM server has to know beside its own: whose it is, and the weight transfer for a CPU.

`--worker-extension-cls grpo_core.rollout.vllm.worker.TrainerLease` puts it into the server's workers. It is called
through vLLM's `/collective_rpc`.
"""

from __future__ import annotations

import time
from typing import Any

from grpo_core.rollout.vllm import over_http  # noqa: F401  # registers this transfer, and that by shared memory
from grpo_core.rollout.vllm.logprobs import ignore_truncation
from grpo_core.rollout.vllm.shared_memory import pid_namespace_id


class TrainerLease:
    """One trainer at a time: it holds a lease, renews it, and loses it if it does not renew it in time."""

    def take_lease(self: Any, token: str, holder: str, seconds: float) -> dict[str, Any]:
        """Whether the lease is now `token`'s for `seconds`; whose it is (`holder`, a name for people) and for how
        long; and how this server was started."""
        now = time.monotonic()
        own, _, until = getattr(self, "_lease", ("", "", now))
        if own in ("", token) or until <= now:
            self._lease = token, holder, now + seconds
        own, name, until = self._lease
        if not hasattr(self, "_truncation_problem"):
            self._truncation_problem = ignore_truncation(self.model_runner)
        config = self.vllm_config
        transfer = config.weight_transfer_config
        return {
            "granted": own == token,
            "holder": name,
            "seconds": until - now,
            "server": {
                "weight_transfer": transfer.backend if transfer else None,
                "dtype": str(self.model_config.dtype).removeprefix("torch."),
                "logprobs_mode": self.model_config.logprobs_mode,
                "truncation_problem": self._truncation_problem,
                "max_model_len": self.model_config.max_model_len,
                "max_num_seqs": config.scheduler_config.max_num_seqs,
                "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
                "scheduling_policy": config.scheduler_config.policy,
                "on_cpu": self.device.type == "cpu",
                "pid_namespace_id": pid_namespace_id(),
            },
        }

    def end_weight_update(self: Any) -> None:
        """End what was left half-done, by this trainer or another: all of the weights come again."""
        if self._weight_update_active:
            self.finish_weight_update()

    def release_lease(self: Any, token: str) -> None:
        """Give the lease back, if it is `token`'s."""
        if getattr(self, "_lease", ("",))[0] == token:
            del self._lease
