"""Weights for a vLLM server on the same machine's CPU: a backend for vLLM's weight-transfer API, which has none there.

The trainer writes the weights into memory that has a file descriptor but no name, and tells the server where to find
it. However the trainer ends, the memory is freed. Both sides import this module, which registers both ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import (
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "shared_memory"
PART_BYTES = 2**29  # of weights per request


def pid_namespace_id() -> str:
    """Identity of the process ids that this process sees: the same in all processes of one machine or one container."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + str(Path("/proc/self/ns/pid").readlink())


@dataclass
class SharedMemoryTrainerInit(TrainerInitInfo):
    """The two sides have nothing to agree on."""

    backend: ClassVar[str] = BACKEND


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    """The two sides have nothing to agree on."""


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):
    """`path`: where the server finds the trainer's open file, written by torch.save: name → tensor."""

    path: str


class SharedMemoryTrainerEngine(TrainerWeightTransferEngine[SharedMemoryTrainerInit]):
    """Trainer's side of the transfer."""

    init_info_cls = SharedMemoryTrainerInit

    @classmethod
    def trainer_init(
        cls, init_info: SharedMemoryTrainerInit, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> SharedMemoryTrainerEngine:
        client.init_weight_transfer_engine({})
        return cls(client=client, source=source)

    def send_weights(self) -> None:
        assert self.source is not None
        self.client.start_weight_update()
        for part in parts(self.source, PART_BYTES):
            with os.fdopen(os.memfd_create("grpo-weights"), "wb") as file:
                torch.save(part, file)
                file.flush()
                self.client.update_weights({"path": f"/proc/{os.getpid()}/fd/{file.fileno()}"})
        self.client.finish_weight_update()


def parts(weights: Iterable[tuple[str, Tensor]], part_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield the weights in parts of about `part_bytes`: only one part at a time exists twice."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        part[name] = tensor
        size += tensor.numel() * tensor.itemsize
        if size >= part_bytes:
            yield part
            part, size = {}, 0
    if part:
        yield part


class SharedMemoryEngine(WeightTransferEngine[SharedMemoryInit, SharedMemoryUpdate]):
    """Server's side of the transfer. It loads as from a checkpoint, so that vLLM packs weights again if it does."""

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryUpdate

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Do as the base class, except that there is no accelerator to wait for."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        weights: dict[str, Any] = torch.load(update_info.path, mmap=True, weights_only=True)
        self.model.load_weights(weights.items())  # type: ignore[operator]  # as every model of vLLM has it

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryEngine)
WeightTransferTrainerFactory.register_engine(BACKEND, SharedMemoryTrainerEngine)
