"""The policy: the log-probabilities of completions under a model, perhaps with compiled layers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float, Float32, Int, Int16, Int64
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_core.errors import ConfigError
from grpo_core.model.capabilities import (
    check_recomputing,
    decoder,
    hidden_states,
    make_packable,
    plain_output_layer,
    why_not_packed,
)
from grpo_core.model.images import Shown, keys, look, showing
from grpo_core.model.loading import adapter_dropouts
from grpo_core.model.logprobs import (
    LEAST,
    Figure,
    Floor,
    Taught,
    chosen_logprobs,
    gives_float32_logits,
    leave_out,
    lowest_logits,
    over_logits,
    teacher_divergence,
)
from grpo_core.model.packed_attention import Kind, PackedBatch, pack_batch, packed_states, with_images
from grpo_core.model.packed_rows import takes_rows
from grpo_core.model.precision import in_float32, refresh, working_copy
from grpo_core.model.routing import Routers, Seen, difference, reading
from grpo_core.model.sequences import Sequences
from grpo_core.model.sharded import call_as_forward, forward, is_sharded
from grpo_core.system.to_device import move, to_device

OWN_LOGITS = "its logits are not those of a linear layer alone"
_scoring = ContextVar("_scoring", default=False)


def _logprobs_and_entropy(
    logits: Float32[Tensor, "N V"], targets: Int[Tensor, " N"], floor: Floor | None = None
) -> tuple[Float32[Tensor, " N"], Float32[Tensor, " N"]]:
    if floor is not None:
        logits = leave_out(logits.clone(), targets, lowest_logits(logits.detach(), 1.0, floor))
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * (log_p if floor is None else log_p.clamp(min=LEAST))).sum(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), entropy


def _in_rows(values: Float32[Tensor, " N"], inputs: PassInputs) -> Float32[Tensor, "B T"]:
    empty = torch.zeros(math.prod(inputs.shape), device=values.device)
    return empty.index_copy(0, inputs.places, values).view(inputs.shape)


@dataclass(frozen=True)
class PaddedRows:
    """Tokens of rows that are not packed: right-padded, which causal attention needs no mask for."""

    input_ids: Int64[Tensor, "B L"]
    predicts: Int64[Tensor, " N"]  # place among the B · L whose output predicts each completion token, row by row
    shown: Shown | None = None


@dataclass(frozen=True)
class PassInputs:
    """Inputs of a forward pass over B sequences, whose N completion tokens lie in B rows of at most T."""

    tokens: PackedBatch | PaddedRows
    targets: Int64[Tensor, " N"]  # the completion tokens, row by row
    places: Int64[Tensor, " N"]  # of each among the B · T
    shape: tuple[int, int]  # (B, T)
    routes: Int16[Tensor, "M F"] | None = None  # the engine's experts of each token, see routing.choices


class Policy(nn.Module):
    """A causal LM whose forward gives what the loss needs.

    `master` has the weights that an optimizer moves; `model` computes, and is the same, or a bfloat16 copy of it. A
    sharded model is the same in any precision: its weights are gathered in the one that it computes in.
    `max_length`: tokens of the longest sequence that it is asked about.
    """

    def __init__(
        self,
        master: Any,
        temperature: float,
        *,
        max_length: float = math.inf,
        bf16: bool = False,
        gradient_checkpointing: bool = False,
        torch_compile: bool = False,
    ):
        super().__init__()
        self.master = master
        self.is_sharded = is_sharded(master)
        self.model = model = working_copy(master) if bf16 and not self.is_sharded else master
        self.temperature, self.max_length, self.compiles = temperature, max_length, torch_compile
        self.floor: Floor | None = None  # None: all tokens can be sampled
        self.routers: Routers | None = None  # of a mixture, if they are to be read
        self.replays_routes = False
        self.output_layer = plain_output_layer(model)
        self.rounds_logits = bf16 and not gives_float32_logits(model)
        on_gpu = next(model.parameters()).is_cuda
        kinds: list[Kind] = ["varlen", "flex"] if on_gpu else ["padded"]
        found, self.why_not = None, OWN_LOGITS
        if self.output_layer is not None:
            # In float32, where rounding does not change the routing of experts; kernels are tried in their own dtype.
            with nullcontext() if on_gpu or self.is_sharded else in_float32(model):
                found, self.why_not = make_packable(model, kinds, max_length=max_length)
        self.packs, self.attention = found is not None, found or kinds[0]
        self.with_rows = self.packs and takes_rows(self.decoder)
        self.recomputable, self.recomputed = _outermost_layers(model), 0
        if self.packs and (why_not := why_not_packed(self)):
            self.packs, self.why_not = False, why_not
        self.zero_grad()
        self.dropouts = adapter_dropouts(model)
        if gradient_checkpointing:
            if not self.recomputable:
                raise ConfigError(
                    f"gradient_checkpointing=true: {type(model).__name__} has no layers that transformers can "
                    "recompute; turn it off"
                )
            self.recompute(len(self.recomputable))
        self.uncompiled = compile_layers(self.recomputable) if torch_compile else []

    @cached_property
    def decoder(self) -> Any:
        """The module that gives the last hidden states."""
        return decoder(self.model)

    @property
    def notes(self) -> list[str]:
        """A sentence with its reason for each thing that passes do in a slower or other way than they could."""
        found: list[str] = []
        if not self.packs:
            why = self.why_not or "another process cannot pack them"
            found.append(f"prompts are computed again for each completion, and rows are padded: {why}")
        elif self.with_rows:
            found.append("layers that carry a state compute a prompt's again for each completion")
        if self.packs and self.why_not:
            found.append(f"prompts are computed once, by {self.attention} attention: {self.why_not}")
        if self.output_layer is None:
            found.append(f"a pass holds the logits of all its tokens together: {OWN_LOGITS}")
        if self.rounds_logits:
            found.append("logits are rounded to bfloat16: the model's output layer is not a linear one")
        return found + self.uncompiled

    def prepare(self, sequences: Sequences) -> PassInputs:
        """Return the inputs of a forward pass. The CPU makes them and does not wait until the device has them.

        All indices are made on the CPU, where the lengths are: asking a device for a size would wait for all its work.
        """
        lengths = sequences.completion_lengths
        width = int(lengths.max())
        rows, offsets = (torch.arange(width) < lengths[:, None]).nonzero(as_tuple=True)
        columns = sequences.prompt_lengths[rows] + offsets
        if self.packs:
            batch = pack_batch(sequences, self.attention, with_rows=self.with_rows, one_block=self.compiles)
            tokens: PackedBatch | PaddedRows = with_images(self.model, batch, sequences)
        else:
            ids, shown = look(self.model, sequences.input_ids)
            tokens = PaddedRows(ids, rows * ids.shape[1] + columns - 1, shown)
        routes = None
        if self.routers is not None and sequences.routes is not None:
            routes = sequences.routes.flatten(0, 1)
            routes = routes[tokens.places] if isinstance(tokens, PackedBatch) else routes
        inputs = PassInputs(
            tokens,
            targets=sequences.input_ids[rows, columns],
            places=rows * width + offsets,
            shape=(len(lengths), width),
            routes=routes,
        )
        return to_device(inputs, next(self.model.parameters()).device)

    def forward(
        self, inputs: PassInputs, *, entropy_gradient: bool = False, taught: Sequence[Taught] | None = None
    ) -> tuple[Float32[Tensor, "B T"], ...]:
        """Log-probability of each completion token, at the sampling temperature, and the entropy there, both over the
        tokens that can be sampled. With `taught`, also `teacher_divergence`, over the whole vocabulary.

        float32 whatever the model's dtype; 0 past a completion's end. The entropy has a gradient only when asked to.
        """
        layer, targets = self.output_layer, inputs.targets
        how = self.temperature, self.floor
        with self.recomputing(), compiled():
            if layer is None:
                found = _logprobs_and_entropy(self._own_logits(inputs.tokens), targets, self.floor)
            else:  # without the model's own forward pass

                def read(tokens: PackedBatch | PaddedRows) -> tuple[Tensor, ...]:
                    hidden = self.hidden_states(tokens)
                    chosen = chosen_logprobs(hidden, layer.weight, targets, *how)
                    if taught is None:
                        return chosen
                    return chosen + teacher_divergence(hidden, layer.weight, targets, self.temperature, taught)

                found = call_as_forward(self.model, read, inputs.tokens)
        logprobs, entropy, *others = found
        if not entropy_gradient:
            entropy = entropy.detach()
        return tuple(_in_rows(values, inputs) for values in (logprobs, entropy, *others))

    @torch.no_grad()
    def as_teacher(
        self,
        sequences: Sequences,
        rows: Tensor,
        beta: float,
        top_k: int,
        *,
        changes: bool = False,
        head: Tensor | None = None,
    ) -> Taught:
        """Return what a policy's distributions of the completion tokens of these rows are compared with. With a sharded
        model, all processes call this, also those without rows. `changes`: this model gets other weights before;
        `head`: the output layer's, if it has been kept for other rows."""
        layer = self.output_layer
        assert layer is not None
        lengths = sequences.completion_lengths
        ends, own = lengths.cumsum(0), lengths[rows]
        # Of each row's tokens one after the other: where they begin, and how many there are.
        places = torch.arange(int(own.sum())) + (ends[rows] - own.cumsum(0)).repeat_interleave(own)
        shortest = sequences.lengths.argmin()[None]
        inputs = self.prepare(sequences.take(rows if len(rows) else shortest))

        def read(tokens: PackedBatch | PaddedRows) -> tuple[Tensor, Tensor]:
            keep = self.is_sharded or (changes and layer.weight.requires_grad)
            weight = layer.weight if head is None else head
            return self.hidden_states(tokens), weight.clone() if keep and head is None else weight

        with compiled():
            hidden, weight = call_as_forward(self.model, read, inputs.tokens)
        (places,) = move([places], hidden.device)
        return Taught(places, hidden[: len(places)], weight, beta, top_k)

    @torch.no_grad()
    def over_logits(self, inputs: PassInputs, figure: Figure) -> Float32[Tensor, "B T"]:
        """A figure of each completion token and of the logits, at the sampling temperature, that predict it; 0 past its
        end."""
        layer, targets = self.output_layer, inputs.targets
        with compiled():
            if layer is None:
                found = figure(self._own_logits(inputs.tokens), targets)
            else:
                found = call_as_forward(
                    self.model,
                    lambda tokens: over_logits(
                        self.hidden_states(tokens), layer.weight, targets, self.temperature, figure
                    ),
                    inputs.tokens,
                )
        return _in_rows(found, inputs)

    def routing(self, inputs: PassInputs) -> AbstractContextManager[Seen]:
        """Inside, for a pass over these inputs and its backward pass, what the routers choose is noted, if they are
        read, and with `replays_routes` the engine's experts are taken instead."""
        return reading(self.routers, inputs.routes if self.replays_routes else None)

    def routing_difference(self, seen: Seen, inputs: PassInputs) -> Float32[Tensor, "B T"] | None:
        """Share of the layers whose routers choose other experts than the engine's did, where each completion token is
        predicted; 0 past its end. None if the engine's are not known."""
        if self.routers is None or inputs.routes is None or not seen or inputs.routes.shape[1] != self.routers.width:
            return None
        return _in_rows(difference(seen, inputs.routes)[inputs.tokens.predicts], inputs)

    def _own_logits(self, tokens: PackedBatch | PaddedRows) -> Float32[Tensor, "N V"]:
        """Logits of the completion tokens by the model's own forward pass."""
        options = keys(self.model, tokens.shown)
        with showing(self.model, tokens.shown):
            logits = forward(self.model, input_ids=tokens.input_ids, use_cache=False, **options).logits.flatten(0, 1)
        return logits[tokens.predicts].float() / self.temperature

    def hidden_states(self, tokens: PackedBatch | PaddedRows) -> Float[Tensor, "N h"]:
        """Last hidden states that predict the completion tokens, row by row."""
        with showing(self.model, tokens.shown):
            if isinstance(tokens, PackedBatch):
                return packed_states(self.decoder, tokens)
            states = hidden_states(self.model, tokens.input_ids, tokens.shown)
        return states.flatten(0, 1).index_select(0, tokens.predicts)

    @contextmanager
    def dropout(self) -> Iterator[None]:
        """Inside, the adapter's dropout acts. A backward pass that computes layers again belongs inside too."""
        for module in self.dropouts:
            module.train()
        try:
            yield
        finally:
            for module in self.dropouts:
                module.eval()

    def refresh(self) -> None:
        """Bring the copy that computes up to date with the masters."""
        if self.model is not self.master:
            refresh(self.model, self.master)

    def recompute(self, layers: int) -> None:
        """Compute the activations of the first `layers` layers again in the backward pass, instead of keeping them.
        Raises ConfigError if that would change gradients, which is tried once."""
        tried = self.recomputed > 0
        self.recomputed = layers
        if layers and not tried:
            check_recomputing(self)

    def whole(self, temperature: float) -> Policy:
        """Return the same policy at a temperature, over the whole vocabulary."""
        other = copy.copy(self)
        other.temperature, other.floor = temperature, None
        return other

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Inside, the activations of the first `recomputed` layers are computed again in the backward pass: of whole,
        outermost layers. transformers' own way depends on training mode, in which some layers
        apply dropout, and which has to last until a backward pass is done where such layers nest."""
        replaced: list[tuple[nn.Module, Any, Any]] = []
        for layer in self.recomputable[: self.recomputed] if torch.is_grad_enabled() else []:
            recomputed = partial(checkpoint, layer.forward, use_reentrant=False)
            replaced.append((layer, recomputed, vars(layer).get("forward")))
            layer.forward = recomputed
        try:
            yield
        finally:
            for layer, recomputed, own in replaced:
                if layer.forward is not recomputed:  # a compiled layer has given up
                    continue
                del layer.forward
                if own is not None:
                    layer.forward = own


def _outermost_layers(model: nn.Module) -> list[nn.Module]:
    """Layers that transformers can recompute, without those inside of others."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    inner = {id(module) for layer in layers for module in layer.modules() if module is not layer}
    return [layer for layer in layers if id(layer) not in inner]


def compile_layers(layers: Iterable[nn.Module]) -> list[str]:
    """Compile layers of one class in place when a pass of the policy first calls them; they share the compiled code.
    Sampling with the same layers stays as it is: its cache differs from layer to layer and from step to step, so that
    it would be compiled again and again.

    All sizes are dynamic, so that passes of other lengths are not compiled again. If torch's limit of compilations is
    reached all the same, the layers that need one more run uncompiled from then on, which is printed, and is in the
    list that is returned; others stay as they are, since what a backward pass computes again must be the same.
    """
    given_up: list[str] = []
    for layer in layers:
        compiled = torch.compile(layer.forward, dynamic=True)
        layer.forward = partial(_forward, layer, layer.forward, compiled, given_up)
    return given_up


@contextmanager
def compiled() -> Iterator[None]:
    """Inside, passes without a gradient run compiled code too, as those with one always do."""
    token = _scoring.set(True)
    try:
        yield
    finally:
        _scoring.reset(token)


def _forward(
    layer: nn.Module,
    plain: Callable[..., Any],
    compiled: Callable[..., Any],
    given_up: list[str],
    *arguments: Any,
    **keys: Any,
) -> Any:
    # With gradients: sampling has none, and what is computed again in a backward pass is outside of `compiled`.
    if not (torch.is_grad_enabled() or _scoring.get()):
        return plain(*arguments, **keys)
    try:
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            return compiled(*arguments, **keys)
    except FailOnRecompileLimitHit as error:
        layer.forward = plain
        if not given_up:
            why, *_ = str(error.__cause__ or error).split("\n\n")
            given_up.append(f"layers run uncompiled: {why}")
            print(f"train.torch_compile: from now on {given_up[0]}", flush=True)
        return plain(*arguments, **keys)
