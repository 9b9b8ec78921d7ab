"""Weights for a vLLM server on another machine's CPU: a backend for vLLM's weight-transfer API, which has none there.

The weights are in the request itself, so nothing else has to listen, and the secret of the requests guards them too.
Both sides import this module, which registers both ends.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo

from grpo_core.rollout.vllm.shared_memory import (
    SharedMemoryEngine,
    SharedMemoryTrainerEngine,
    SharedMemoryTrainerInit,
    parts,
)

BACKEND = "http"
PART_BYTES = 2**26  # of weights per request: it is held several times on its way through vLLM's processes


@dataclass
class HTTPTrainerInit(SharedMemoryTrainerInit):
    """The two sides have nothing to agree on."""

    backend: ClassVar[str] = BACKEND


@dataclass
class HTTPUpdate(WeightTransferUpdateInfo):
    """`data`: base64 of what torch.save writes of a part: name → tensor."""

    data: str


class HTTPTrainerEngine(SharedMemoryTrainerEngine):
    """Trainer's side of the transfer."""

    init_info_cls = HTTPTrainerInit

    def send_weights(self) -> None:
        assert self.source is not None
        self.client.start_weight_update()
        for part in parts(self.source, PART_BYTES):
            written = io.BytesIO()
            torch.save(part, written)
            self.client.update_weights({"data": base64.b64encode(written.getbuffer()).decode()})
        self.client.finish_weight_update()


class HTTPEngine(SharedMemoryEngine):
    """Server's side of the transfer."""

    update_info_cls: Any = HTTPUpdate

    def receive_weights(self, update_info: Any) -> None:
        weights: dict[str, Any] = torch.load(io.BytesIO(base64.b64decode(update_info.data)), weights_only=True)
        self.model.load_weights(weights.items())  # type: ignore[operator]  # as every model of vLLM has it


WeightTransferEngineFactory.register_engine(BACKEND, HTTPEngine)
WeightTransferTrainerFactory.register_engine(BACKEND, HTTPTrainerEngine)
