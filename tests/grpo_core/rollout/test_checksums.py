"""A weight that does not arrive as it was sent is named, whatever was lost of it, and the device is waited for once."""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_core.config.training import TrainConfig
from grpo_core.errors import EngineError
from grpo_core.model.sharded import sharding
from grpo_core.rollout import transformers_engine
from grpo_core.rollout.checksums import (
    Received,
    bit_sums,
    checksums_of,
    differences,
    note_loading,
    noted,
    place,
    read,
    refuse_lost,
    sums,
)
from grpo_core.rollout.transformers_engine import TransformersEngine
from grpo_core.rollout.vllm import adapter, shared_weights
from grpo_core.rollout.vllm.snapshot import take_snapshot
from tests.grpo_core.training.several import in_two_processes
from tests.pretend_gpu import pretend_gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool)
SHAPES = ((), (1,), (7,), (3, 8), (5, 3), (4, 2, 6), (0, 4), (0,))


def plain_checksum(tensor: Tensor) -> int:
    """Σ mix(rowᵣ ⊕ r·N) + Σ columnₖ · (mix(k·N) | 1), mix being splitmix64's finaliser, in Python's integers. Rows lie
    along the last dimension, those of a vector have one element; their parts are 64-bit words, or elements where a row
    has no whole number of words."""
    width = tensor.shape[-1] if tensor.ndim > 1 else 1
    size = 8 if width * tensor.itemsize % 8 == 0 else tensor.itemsize
    data = bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
    parts = [each for (each,) in struct.iter_unpack({1: "<b", 2: "<h", 4: "<i", 8: "<q"}[size], data)]
    length = max(1, width * tensor.itemsize // size)
    rows = [parts[first : first + length] for first in range(0, len(parts), length)]
    total = sum(_mix(_signed(sum(row)) ^ _signed(number * 0x9E3779B97F4A7C15)) for number, row in enumerate(rows))
    for number, column in enumerate(zip(*rows, strict=True)):
        total += sum(column) * (_mix(_signed(number * 0x9E3779B97F4A7C15)) | 1)
    return _signed(total)


def _mix(value: int) -> int:
    mixed = _signed(value * 0xBF58476D1CE4E5B9)
    return _signed((mixed ^ (mixed >> 29)) * 0x94D049BB133111EB)


def checksum(tensor: Tensor, first_row: int = 0) -> int:
    return read({"": bit_sums(tensor)}, first_rows={"": first_row})[0][""]


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_checksums_are_those_of_plain_integers(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        tensor = torch.randn(shape).mul(100).to(dtype)
        assert checksum(tensor) == plain_checksum(tensor), shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(7,), (6, 8), (5, 3)], ids=str)
def test_each_bit_and_the_order_of_rows_count(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    whole, integers = checksum(tensor), {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    others = {checksum(tensor.flip(0))}
    for n in range(tensor.numel()):
        for bit in range(8 * dtype.itemsize):
            other = tensor.clone()
            other.view(integers).view(-1)[n] ^= 1 << bit if bit < 8 * dtype.itemsize - 1 else -(1 << bit)
            others.add(checksum(other))
    assert whole not in others
    opposite = tensor.view(integers).clone()  # changes that cancel in a plain sum
    opposite[0] += 1
    opposite[1] -= 1
    assert checksum(opposite.view(dtype)) != whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(9,), (6, 16), (4, 9), (3, 4, 8)], ids=str)
def test_the_same_values_at_other_places_have_another_checksum(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """As when shards are joined in another order, along any dimension."""
    tensor = torch.arange(math.prod(shape)).view(shape).to(dtype)
    size = 8 // dtype.itemsize
    moved = [tensor.roll(by, d) for d, length in enumerate(shape) for by in range(1, length)]
    moved += [tensor.flip(d) for d in range(tensor.ndim)]
    one = tensor.clone()  # two values of a row, or two elements of a vector
    one[..., 0], one[..., size] = tensor[..., size], tensor[..., 0]
    assert checksum(tensor) not in {checksum(other) for other in (*moved, one)}


@pytest.mark.parametrize("whole_words", [True, False])
def test_words_of_one_row_in_another_order_have_another_checksum(whole_words: bool) -> None:
    """Their sum is the same, and in a row of a matrix no other row's changes."""
    tensor = torch.arange(45.0)[: 5 * (8 if whole_words else 9)].view(5, -1)
    other = tensor.clone()
    other[2, :4] = tensor[2, [2, 3, 0, 1]]
    assert bit_sums(other)[0].equal(bit_sums(tensor)[0])
    assert checksum(other) != checksum(tensor)


@pytest.mark.parametrize("shape", [(7,), (7, 8), (7, 3)], ids=str)
def test_a_checksum_follows_from_values_alone_and_from_those_of_its_rows(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).bfloat16()
    whole = checksum(tensor)
    strided = torch.stack([tensor, tensor], -1)[..., 0]
    odd = torch.cat([torch.zeros(1, dtype=torch.bfloat16), tensor.flatten()])[1:].view(shape)  # at no word's beginning
    assert not strided.is_contiguous()
    assert [checksum(other) for other in (strided, odd)] == [whole] * 2
    parts = [{"a": checksum(rows, first)} for rows, first in ((tensor[:4], 0), (tensor[4:], 4), (tensor[7:], 7))]
    assert sums(parts) == {"a": whole}


def test_the_device_is_waited_for_once_per_hand_over() -> None:
    with pretend_gpu() as gpu:
        weights = {str(n): torch.randn(3, n + 1, device="cuda") for n in range(9)}
        gpu.waits.clear()
        sent, received = dict[str, Any](), Received(bit_sums)
        assert dict(noted(noted(weights.items(), sent, bit_sums), received.notes, bit_sums)).keys() == weights.keys()
        assert not gpu.waits
        assert differences(*read(sent, received.notes)) == []
        assert len(gpu.waits) == 1, gpu.waits
        sent, received = {}, Received(place)
        assert dict(noted(noted(weights.items(), sent, place), received.notes, place)).keys() == weights.keys()
        assert received.take(sent) == []
        assert len(gpu.waits) == 1, "places need no device"
        assert not gpu.mismatches


def test_what_is_lost_is_named() -> None:
    sent = {"a": 1, "b": 2, "c": 3, "d": 4}
    lost = differences(sent, {"a": 1, "b": 7, "d": 4, "e": 5})
    assert lost == ["c did not arrive", "e was not sent", "b arrived with other values"]
    assert differences(sent, sent) == []
    refuse_lost([])
    with pytest.raises(EngineError, match=r"weights: c did not arrive, e was not sent, b arrived with other values\."):
        refuse_lost(lost)
    with pytest.raises(EngineError, match="4, and 7 more"):
        refuse_lost([str(n) for n in range(12)])


class Loading(nn.Module):
    """A model as vLLM's, which loads what it knows and says so; `passes_over`: a name that it does not load."""

    def __init__(self, passes_over: str = "", says_so: bool = True):
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
        self.passes_over, self.says_so = passes_over, says_so

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        loaded = {name for name, _ in weights if name != self.passes_over}
        return loaded if self.says_so else None


def test_a_parameter_that_the_loading_function_passes_over_is_lost() -> None:
    weights = [(name, each.detach()) for name, each in Loading().named_parameters()]
    for passes_over, lost in (("", []), ("one.bias", ["nothing was loaded into the engine's one.bias"])):
        received = note_loading(model := Loading(passes_over), bit_sums)
        for _ in range(2):
            for part in (weights[:1], weights[1:]):
                model.load_weights(part)
            assert received.take(checksums_of(dict(weights))) == lost
    received = note_loading(model := Loading("one.bias", says_so=False), bit_sums)
    model.load_weights(weights)
    assert received.take(checksums_of(dict(weights))) == [], "it does not say what it loads"


def test_a_module_of_an_adapter_that_the_engine_does_not_have_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, received = {"lora_A": torch.ones(2)}, Received(bit_sums)
    made = SimpleNamespace(loras={"layers.0.q_proj": 0, "layers.0.o_proj": 0, "layers.0.gate": 0})
    layers = mock.Mock(modules={"layers.0.qkv_proj": 0, "layers.0.o_proj": 0})
    layers.packed_modules = {"layers.0.qkv_proj": ["layers.0.q_proj", "layers.0.k_proj"]}
    for module in ("lora_model", "peft_helper"):
        monkeypatch.setitem(sys.modules, f"vllm.lora.{module}", mock.Mock())
    sys.modules["vllm.lora.lora_model"].LoRAModel.from_lora_tensors.return_value = made
    manager = mock.Mock(_adapter_manager=layers)
    adapter._adapter_from_tensors(manager, {}, tensors, received, mock.Mock())
    assert received.take(checksums_of(tensors)) == ["the engine has no layers.0.gate, which the adapter changes"]


def test_copies_and_shared_memory_that_are_not_the_weights_are_noticed() -> None:
    weights = {"fused": torch.randn(4, 2), "norm": torch.randn(2)}
    engine = nn.ParameterDict({name: torch.zeros_like(each) for name, each in weights.items()})
    places = [engine["fused"].data[:2], engine["fused"].data[2:], engine["norm"].data]
    copies = places, [weights["fused"][:2], weights["fused"][2:], weights["norm"]]
    shared_weights.run_copies(copies)
    assert shared_weights.lost_copies(copies, weights) == []
    places[1][1, 1] += 1e-6
    assert shared_weights.lost_copies(copies, weights) == ["copy 1 of fused arrived with other values"]
    assert not shared_weights.have_same_memory(engine, weights)
    shared = {name: engine[name].data for name in weights}
    assert shared_weights.have_same_memory(engine, shared)
    engine["norm"].data = engine["norm"].data.clone()
    assert not shared_weights.have_same_memory(engine, shared)


def test_the_transformers_engine_s_own_copy_of_a_sharded_model_is_compared(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, own = [AutoModelForCausalLM.from_pretrained(model_folder) for _ in range(2)]
    engine = TransformersEngine(own, AutoTokenizer.from_pretrained(model_folder))
    sent = {name: tensor + 1 for name, tensor in policy.state_dict().items()}
    monkeypatch.setattr(transformers_engine, "is_sharded", lambda model: True)
    monkeypatch.setattr(transformers_engine, "whole_weights", lambda model, dtype: iter(sent.items()))
    assert engine.sync_weights(policy) == "copied"
    assert all(tensor.equal(sent[name]) for name, tensor in own.state_dict().items())
    norm = sent.pop("model.norm.weight")
    with pytest.raises(EngineError, match=r"weights: model\.norm\.weight was not sent\."):
        engine.sync_weights(policy)
    sent["model.norm.weight"] = norm + 1
    copies = [{name: each.clone() for name, each in own.state_dict().items()} for _ in range(2)]
    monkeypatch.setattr(own, "state_dict", lambda: copies.pop())  # what is copied into is not what is sampled with
    with pytest.raises(EngineError, match=r"weights: model\.norm\.weight arrived with other values\."):
        engine.sync_weights(policy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_snapshot_of_shards_has_the_checksums_of_the_whole_weights(
    model_folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Each process computes those of its shards; rows that are put together in another order have others."""
    expected = AutoModelForCausalLM.from_pretrained(model_folder).to(dtype).state_dict()

    def work(rank: int) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(model_folder)
        shard = sharding(TrainConfig(sharding="full", num_processes=2, mixed_precision="no"), frozen=False)
        assert shard is not None
        shard(model)
        snapshot = take_snapshot(model, dtype, mine=rank == 0)
        assert (snapshot is None) == (rank == 1)
        if snapshot is not None:
            assert snapshot.checksums == checksums_of(expected) == checksums_of(snapshot)
            snapshot.shards.reverse()
            snapshot.shards[0] |= snapshot.shards[1] | snapshot.shards[0]  # which has what is not sharded
            assert differences(snapshot.checksums, checksums_of(snapshot))

    in_two_processes(tmp_path, work)
