"""Hand-overs of weights in which a part does not arrive, planted between where the weights leave the trainer and where
an engine's loading function receives them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


@dataclass
class Transport:
    """What arrives of the weights that are sent. `loss`: None if all of it does."""

    loss: Loss | None = None
    first: Weights = field(default_factory=dict)  # each weight as it was sent first
    last: Weights = field(default_factory=dict)  # and as it was sent before
    has_lost: bool = False  # whether something other than what was sent has arrived

    def arriving(self, sent: Weights) -> Weights:
        """Return what arrives of these weights."""
        own, sent = sent, {name: tensor.detach().clone() for name, tensor in sent.items()}
        self.first, self.last = {**sent, **self.first}, {**sent, **self.last}
        found = self.loss(sent, self) if self.loss else sent
        unchanged = {name: own[name] for name in found if sent[name].equal(found[name])}
        self.has_lost |= len(unchanged) < len(sent)
        self.last = {**self.last, **sent}
        return {**found, **unchanged}


Loss = Callable[[Weights, Transport], Weights]  # what arrives of what is sent


def stays(pattern: str) -> Loss:
    """Weights whose names match stay as they were first."""
    return lambda sent, transport: {
        name: transport.first[name] if re.search(pattern, name) else sent[name] for name in sent
    }


def half_stays(pattern: str) -> Loss:
    """Half of the rows of weights whose names match stay as they were first."""

    def arrive(sent: Weights, transport: Transport) -> Weights:
        halves = stays(pattern)(sent, transport)
        return {name: torch.cat([sent[name][: len(old) // 2], old[len(old) // 2 :]]) for name, old in halves.items()}

    return arrive


def swapped(one: str, other: str) -> Loss:
    """Weights whose names have `one` arrive in place of those that have `other`, and these in place of those."""

    def arrive(sent: Weights, transport: Transport) -> Weights:
        pairs = {name: name.replace(one, other) for name in sent if one in name and name.replace(one, other) in sent}
        pairs = {a: b for a, b in pairs.items() if sent[a].shape == sent[b].shape}
        return {**sent, **{a: sent[b] for a, b in pairs.items()}, **{b: sent[a] for a, b in pairs.items()}}

    return arrive


def copied(one: str, other: str) -> Loss:
    """Weights whose names have `one` arrive in place of those that have `other`, too."""
    return lambda sent, transport: {name: sent.get(name.replace(other, one), sent[name]) for name in sent}


def left_out(pattern: str) -> Loss:
    """Weights whose names match do not arrive."""
    return lambda sent, transport: {name: sent[name] for name in sent if not re.search(pattern, name)}


LOSSES: dict[str, Loss] = {
    "nothing arrives": stays("."),
    "each update arrives one late": lambda sent, transport: {name: transport.last[name] for name in sent},
    "layer 1 arrives as layer 0 too": copied("layers.1.", "layers.0."),
    "two matrices are swapped": swapped("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"),
    "the upper half of the layers stays": stays(r"layers\.1\."),
    "layer 0 stays": stays(r"layers\.0\."),
    "one MLP stays": stays(r"layers\.0\.mlp\."),
    "the embedding stays": stays("embed_tokens"),
    "lm_head stays": stays("lm_head"),
    "all norms stay": stays("norm"),
    "all biases stay": stays("bias"),
    "half the rows of lm_head stay": half_stays("lm_head"),
    "half the rows of the embedding stay": half_stays("embed_tokens"),
    "one matrix does not arrive": left_out(r"layers\.1\.self_attn\.q_proj\.(weight|lora_A)"),
}


@contextmanager
def planted(engine: Any, transport: Transport) -> Iterator[None]:
    """Inside, weights come to this engine by the transport."""
    if hasattr(engine, "servers"):
        on_the_way = _on_the_way_to_servers(transport)
    elif hasattr(engine, "llm"):
        on_the_way = _in_process(engine, transport)
    else:  # a simulated one
        on_the_way = mock.patch.object(engine, "arriving", transport.arriving)
    with on_the_way:
        yield


@contextmanager
def _on_the_way_to_servers(transport: Transport) -> Iterator[None]:
    from grpo_core.rollout.vllm import send_weights

    send_adapter = send_weights._send_adapter

    def send_arriving(server: Any, weights: Any, connection: Any) -> Any:
        return send_adapter(server, replace(weights, snapshot=transport.arriving(weights.snapshot)), connection)

    def arriving(source: Any) -> Iterator[tuple[str, Tensor]]:
        yield from transport.arriving(source.snapshot).items()

    with (
        mock.patch.object(send_weights, "_send_adapter", send_arriving),
        mock.patch.object(send_weights.Source, "__iter__", arriving),
    ):
        yield


@contextmanager
def _in_process(engine: Any, transport: Transport) -> Iterator[None]:
    """Lose weights of vLLM in the training process, which gets them by copies, by its own loader, or as an adapter."""
    from grpo_core.rollout.vllm import colocated_engine
    from grpo_core.rollout.vllm.adapter import hold_adapter

    call, copy = engine.llm.collective_rpc, colocated_engine.run_copies

    def call_with_arriving(method: Any, *, args: Any = (), kwargs: Any = None) -> Any:
        if method == "reload_weights":
            kwargs = {"weights_iterator": iter(transport.arriving(dict(kwargs["weights_iterator"])).items())}
        if method is hold_adapter:
            args = (args[0], dict(transport.arriving(args[1])), *args[2:])
        return call(method, args=args, kwargs=kwargs)

    def copy_arriving(copies: Any) -> None:
        targets, sources = copies
        pieces: dict[str, Tensor] = {}
        for source in sources:
            name = engine.names[place(source)]
            pieces[f"{name} {len(pieces)}" if name in pieces else name] = source
        found = transport.arriving(pieces)
        kept = [(target, found[name]) for target, name in zip(targets, pieces, strict=True) if name in found]
        copy(([target for target, _ in kept], [source for _, source in kept]))

    def place(tensor: Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    take = engine._take_weights

    def take_named(model: Any) -> str:
        engine.names = {place(tensor): name for name, tensor in model.state_dict().items()}
        return take(model)

    with (
        mock.patch.object(engine.llm, "collective_rpc", call_with_arriving),
        mock.patch.object(colocated_engine, "run_copies", copy_arriving),
        mock.patch.object(engine, "_take_weights", take_named),
    ):
        yield
