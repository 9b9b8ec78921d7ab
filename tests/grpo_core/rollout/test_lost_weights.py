"""A weight that is lost on its way into vLLM ends the hand-over with its name, whichever way it takes. vLLM itself is

pytestmark = pytest.mark.served
pretended: its loading functions receive what arrives; what is noted, asked and refused is real."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from grpo_core.config.inputs import ModelConfig
from grpo_core.config.training import TrainConfig
from grpo_core.errors import EngineError
from grpo_core.model.loading import load_model, with_adapter
from grpo_core.model.sharded import sharding
from grpo_core.rollout.checksums import bit_sums, note_loading, place
from grpo_core.rollout.vllm import colocated_engine
from grpo_core.rollout.vllm.adapter import hold_adapter
from grpo_core.rollout.vllm.colocated_engine import VLLMEngine
from tests.grpo_core.rollout.pretend_vllm import Pretended, connected, pretended
from tests.grpo_core.rollout.test_vllm_client import make_transfer
from tests.grpo_core.training.several import in_two_processes
from tests.held import held

Arriving = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


def without(part: str) -> Arriving:
    return lambda sent: {name: each for name, each in sent.items() if part not in name}


def changed(part: str) -> Arriving:
    return lambda sent: {name: each + 1 if part in name else each for name, each in sent.items()}


# What arrives, and what is said of it; of whole weights and of an adapter.
LOSSES: dict[str, tuple[Arriving, str]] = {
    "left out": (without("layers.1.self_attn.q_proj"), r"layers\.1\.self_attn\.q_proj\S+ did not arrive"),
    "other values": (
        changed("layers.1.self_attn.q_proj"),
        r"layers\.1\.self_attn\.q_proj\S+ arrived with other values",
    ),
    "nothing lost": (dict, ""),
}


class Engine(nn.Module):
    """A model of vLLM, which loads what it is given."""

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        return {name for name, _ in weights}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's part in making an adapter of tensors."""
    for module in ("lora_model", "peft_helper", "request"):
        monkeypatch.setitem(sys.modules, f"vllm.lora.{module}", mock.Mock())
    sys.modules["vllm.lora.lora_model"].LoRAModel.from_lora_tensors.return_value = SimpleNamespace(loras={})


def lora_manager() -> Any:
    return mock.Mock(_adapter_manager=mock.Mock(modules={}, packed_modules={}))


def make_worker(copy: int) -> Any:
    """A worker of the server's `copy`th copy of the model, with a trainer's lease."""
    names = ("over_http", "shared_memory", "shared_weights", "speculation")
    parts = {f"grpo_core.rollout.vllm.{name}": mock.Mock() for name in names}
    with held(sys.modules, parts, ours="grpo_core."):
        module: ModuleType = importlib.import_module("grpo_core.rollout.vllm.worker")
    worker = module.TrainerLease()
    worker.device, worker.model_runner = torch.device("cpu"), SimpleNamespace(lora_manager=lora_manager())
    worker.vllm_config = mock.Mock(**{"parallel_config.data_parallel_index": copy})
    worker.model = Engine()
    worker._received = note_loading(worker.model, bit_sums)
    return worker


def answering_for(server: Pretended, workers: list[Any], arriving: Arriving) -> Callable[[str, dict[str, Any]], Any]:
    """What a server with these workers answers, one per copy, when not all that was sent arrives at the last."""
    answer = server.answer

    def answered(path: str, body: dict[str, Any]) -> Any:
        if path == "/collective_rpc" and body.get("method") in ("take_adapter_part", "lost_weights"):
            found = [getattr(worker, body["method"])(*body["args"]) for worker in workers]
            if body["method"] == "take_adapter_part":
                workers[-1]._adapter = arriving(workers[-1]._adapter)
                hold_adapter(workers[-1], body["args"][1], workers[-1]._adapter, workers[-1]._received)
            return {"results": found[:1]}
        if path == "/v1/load_lora_adapter":
            for worker in workers:
                worker.model_runner.lora_manager._load_adapter(SimpleNamespace(lora_int_id=1))
        return answer(path, body)

    return answered


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("adapter", [False, True], ids=["weights", "adapter"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.usefixtures("vllm")
def test_a_server_that_has_not_received_what_was_sent_ends_the_hand_over(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, loss: str, adapter: bool, copies: int
) -> None:
    """Also in a copy of the model whose answers vLLM does not pass on."""
    arriving, said = LOSSES[loss]
    config = ModelConfig(name_or_path=str(model_folder), use_peft=adapter, lora_r=4)
    model, transfer = with_adapter(load_model(model_folder), config), make_transfer()
    workers = [make_worker(copy) for copy in range(copies)]
    source = SimpleNamespace(snapshot={})

    def send_weights() -> None:
        for worker in workers:
            worker.model.load_weights((arriving if worker is workers[-1] else dict)(source.snapshot).items())

    monkeypatch.setattr(transfer, "_connect", lambda *_: mock.Mock(source=source, send_weights=send_weights))
    keys = {"use_peft": adapter, "lora_r": 4, "vllm_server_timeout": 30.0}
    with pretended(128) as (server,):
        server.started |= {"lora_rank": 8 * adapter, "weight_transfer": "http"}
        monkeypatch.setattr(server, "answer", answering_for(server, workers, arriving))
        refused = (
            pytest.raises(EngineError, match=rf"not have the trainer's weights: \S*{said}") if said else nullcontext()
        )
        with refused, connected(model_folder, monkeypatch, [server], model, sender=transfer.Sender, **keys) as engine:
            assert not engine.servers[0].problem


def colocated(model: nn.Module, arriving: Arriving, *, adapted: bool = False) -> VLLMEngine:
    """An engine in this process, at whose loading functions this arrives of the weights."""
    inside, manager = Engine(), lora_manager()

    def collective_rpc(method: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> None:
        if method == "reload_weights":
            inside.load_weights(iter(arriving(dict((kwargs or {})["weights_iterator"])).items()))
        else:
            config, tensors, received = args
            worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=manager))
            method(worker, config, arriving(tensors), received)

    core = mock.Mock(**{"scheduler.has_requests.return_value": False, "batch_queue": []})
    engine: Any = VLLMEngine.__new__(VLLMEngine)
    engine.llm = mock.Mock(collective_rpc=collective_rpc)
    engine.llm.llm_engine.engine_core.engine_core = core
    engine.llm.llm_engine.model_config.dtype = torch.float32
    engine.llm.llm_engine.add_lora = lambda request: manager._load_adapter(SimpleNamespace(lora_int_id=1))
    engine.received = note_loading(inside, place)
    engine.adapted, engine.adapter_ids = adapted, itertools.count(1)
    engine.shares_with, engine.copies, engine.copied_from = None, None, []
    return engine


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colocated_engine, "unpacked_linear_layers", nullcontext)


@pytest.mark.parametrize("adapter", [False, True], ids=["reload", "adapter"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.usefixtures("vllm", "unpacked")
def test_an_engine_in_the_process_whose_loader_loses_a_weight_ends_the_hand_over(
    model_folder: Path, loss: str, adapter: bool
) -> None:
    arriving, said = LOSSES[loss]
    config = ModelConfig(name_or_path=str(model_folder), use_peft=adapter, lora_r=4)
    model = with_adapter(load_model(model_folder), config)
    engine = colocated(model, arriving, adapted=adapter)
    with pytest.raises(EngineError, match=rf"not have the trainer's weights: \S*{said}") if said else nullcontext():
        assert engine.sync_weights(model) == ("adapter" if adapter else "reloaded")


@pytest.mark.parametrize("lost", [False, True])
def test_an_engine_in_the_process_that_copies_weights_elsewhere_ends_the_hand_over(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    model = load_model(model_folder)
    weights, engine = model.state_dict(), colocated(model, dict)
    engine.copies = [torch.zeros_like(each) for each in weights.values()], [*weights.values()]
    engine.copied_from = [each.data_ptr() for each in weights.values()]

    def run_copies(copies: Any) -> None:
        for target, source in [*zip(*copies, strict=True)][lost:]:
            target.copy_(source)

    monkeypatch.setattr(colocated_engine, "run_copies", run_copies)
    name = next(iter(weights))
    with pytest.raises(EngineError, match=f"copy 0 of {name} arrived with other values") if lost else nullcontext():
        assert engine.sync_weights(model) == "copied"


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.usefixtures("unpacked")
def test_a_loader_that_loses_a_weight_of_a_sharded_training_ends_the_hand_over(
    model_folder: Path, tmp_path: Path, loss: str
) -> None:
    arriving, said = LOSSES[loss]

    def work(rank: int) -> None:
        model: Any = load_model(model_folder)
        shard = sharding(TrainConfig(sharding="full", num_processes=2, mixed_precision="no"), frozen=False)
        assert shard is not None
        shard(model)
        engine = colocated(model, arriving)
        with pytest.raises(EngineError, match=rf"not have the trainer's weights: \S*{said}") if said else nullcontext():
            assert engine.sync_weights(model) == "reloaded"

    in_two_processes(tmp_path, work)
