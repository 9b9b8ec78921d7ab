"""Additions to a vLLM server's workers: a trainer's lease, and the weight transfer for a CPU.

`--worker-extension-cls grpo_core.rollout.vllm.worker.TrainerLease` puts them into the workers. They are called
through vLLM's `/collective_rpc`.
"""

from __future__ import annotations

import base64
import io
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistNetworkError, DistStoreError  # noqa: TID251  # errors, no collective

from grpo_core.rollout.checksums import LOST, SHOWN, bit_sums, note_loading
from grpo_core.rollout.vllm import over_http  # noqa: F401  # registers this transfer, and that by shared memory
from grpo_core.rollout.vllm.adapter import hold_adapter
from grpo_core.rollout.vllm.shared_memory import pid_namespace_id
from grpo_core.rollout.vllm.shared_weights import repack_experts
from grpo_core.rollout.vllm.speculation import repair_expansion, speculation_of

WATCH = timedelta(hours=1)  # of one request for news of the trainer

repack_experts()
repair_expansion()


class TrainerLease:
    """One trainer at a time: it holds a lease, renews it, and loses it if it does not renew it in time."""

    def take_lease(self: Any, token: str, holder: str, seconds: float) -> dict[str, Any]:
        """Return whether the lease is now `token`'s for `seconds`, whose it is (`holder`, a name for people), for how
        long, and how this server was started."""
        now = time.monotonic()
        own, _, until = getattr(self, "_lease", ("", "", now))
        if own in ("", token) or until <= now:
            self._lease = token, holder, now + seconds
        own, name, until = self._lease
        if not hasattr(self, "_received"):
            self._received = note_loading(self.get_model(), bit_sums)
        config = self.vllm_config
        transfer = config.weight_transfer_config
        return {
            "granted": own == token,
            "holder": name,
            "seconds": until - now,
            "server": {
                "weight_transfer": transfer.backend if transfer else None,
                "dtype": str(self.model_config.dtype).removeprefix("torch."),
                "head_dtype": str(self.model_config.head_dtype).removeprefix("torch."),
                "logprobs_mode": self.model_config.logprobs_mode,
                "max_model_len": self.model_config.max_model_len,
                "lora_rank": config.lora_config.max_lora_rank if config.lora_config else 0,
                "max_num_seqs": config.scheduler_config.max_num_seqs,
                "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
                "scheduling_policy": config.scheduler_config.policy,
                "speculation": speculation_of(config.speculative_config),
                "on_cpu": self.device.type == "cpu",
                "pid_namespace_id": pid_namespace_id(),
            },
        }

    def end_weight_update(self: Any) -> int:
        """End an update that was left half-done, by this trainer or another, since all of the weights come again, and
        the connection by which it came, whose communicator NCCL would keep. Return the server's number of workers."""
        if self._weight_update_active:
            self.finish_weight_update()
        self._received.take({})
        self.shutdown_weight_transfer_engine()
        return self.vllm_config.parallel_config.world_size_across_dp

    def watch_sender(self: Any, ended: str) -> None:
        """From now on, abort this worker's communicator when the trainer has set the key `ended`, or is gone: a
        broadcast that the trainer has left would never end, and the worker answers nothing meanwhile."""
        communicator = self.weight_transfer_engine.model_update_group
        threading.Thread(target=abort_with_sender, args=(communicator, ended), daemon=True).start()

    def lost_weights(self: Any, sent: dict[str, int]) -> list[str]:
        """Return a phrase for each weight that has not been received as it was sent. Raises RuntimeError instead in
        copies of the model other than the first, whose answers vLLM does not pass on."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()  # NCCL's weights are loaded on streams of their own
        lost = self._received.take(sent)
        if lost and self.vllm_config.parallel_config.data_parallel_index:
            raise RuntimeError(LOST + ", ".join(lost[:SHOWN]))
        return lost

    def take_adapter_part(self: Any, number: int, config: dict[str, Any], path: str | None, data: str) -> None:
        """Hold a part of an adapter, number 0 the first, until vLLM loads it: what torch.save wrote of its tensors, in
        a file of this machine or in base64."""
        source = path or io.BytesIO(base64.b64decode(data))
        self._adapter = {} if number == 0 else self._adapter
        self._adapter |= torch.load(source, mmap=bool(path), weights_only=True)
        hold_adapter(self, config, self._adapter, self._received)

    def release_lease(self: Any, token: str) -> None:
        """Give the lease back, if it is `token`'s."""
        if getattr(self, "_lease", ("",))[0] == token:
            del self._lease


def abort_with_sender(communicator: Any, ended: str) -> None:
    with suppress(DistNetworkError):  # the trainer's process, which has the store, is gone
        while not communicator.disabled:
            with suppress(DistStoreError):  # nothing for so long
                communicator.group.store.wait([ended], WATCH)
                break
    communicator.destroy()
