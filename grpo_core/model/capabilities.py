"""What a model's architecture allows: found out once, by trying it on random tokens, as many as the run's longest
sequence has, or fewer with the model's own lengths shortened."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_core.errors import ConfigError
from grpo_core.model.images import Images, Shown, image_ids, images_of, keys, on_device, showing, whole
from grpo_core.model.logprobs import Float32Logits
from grpo_core.model.packed_attention import Kind, pack_batch, packed_states, use_attention, with_images
from grpo_core.model.packed_rows import takes_rows
from grpo_core.model.sequences import Sequences
from grpo_core.model.sharded import call_as_forward, forward
from grpo_core.system.to_device import to_device

PROBED = 100  # tokens of the sequences that two ways to compute are compared on: several blocks of flex attention
LONGEST = 512  # tokens of the longest sequences that are tried: in float32, a small part of what an update takes
# Attributes of configurations and layers: keys, or blocks of keys, that sparse attention selects (DeepSeek, MiniMax M3,
# Qwen 4), and the tokens after which Llama 4 scales queries by their position.
THRESHOLDS = ("index_topk", "index_topk_blocks", "topk_blocks", "indexer_budget", "token_budget", "block_topk")
THRESHOLDS += ("floor_scale",)
# Relative, between two ways to compute the same states or logits, and the same gradients; and between gradients by the
# same kernels on the same values.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03}
GRADIENT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}
SAME_KERNELS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# Deep models in bfloat16 differ by more from rounding alone: this times the difference between transformers' eager and
# fused attention is allowed. At 28 layers a correct packed batch had 1.0 times that, one that mixes completions 10+.
ROUNDING = 3.0
SHORTEST = 16  # tokens of a probe of gradients that are tried at least when memory runs out
COMPARED = 2**17  # elements of the smallest trained parameters, whose gradients are compared
# Kinds of layers in configurations: those that carry a state, and those that see one token at a time.
STATES, BY_TOKEN = {"linear_attention", "conv", "hybrid"}, {"moe", "mlp"}
NOT_TO_ALL = "a layer attends to a window of tokens only, or carries a state"


def decoder(model: Any) -> Any:
    """Return the module that gives the last hidden states, with the adapter in place if there is one. Raises
    ConfigError if transformers does not say which it is."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    # It does not find that of Llama 4's text model, and calls the head of ModernBERT so.
    for found in (base.get_decoder(), getattr(base, "model", None)):
        if isinstance(found, PreTrainedModel) and found is not base:
            return found
    raise ConfigError(
        f"{type(base).__name__}: none of its modules is the one that gives hidden states, by what transformers says; "
        "choose a model of another architecture"
    )


def hidden_states(model: Any, ids: Tensor, shown: Shown | None) -> Tensor:
    """Last hidden states of rows that are padded on the right, in which `look` has found these images. (B, L, h)

    Inside of `showing` them."""
    read = decoder(model) if shown is None else whole(model)
    return read(input_ids=ids, use_cache=False, **keys(model, shown)).last_hidden_state


@torch.no_grad()
def plain_output_layer(model: Any) -> nn.Linear | None:
    """Return the linear layer that alone turns the decoder's output into logits.

    None for models that scale or cap their logits, whose output layer is adapted or has a bias, or whose states have
    another precision: there the model itself has to make them. A layer that is trained whole beside an adapter is found
    in peft's wrapper, whose weight is the base's while the adapter is disabled.
    """
    layer: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if type(getattr(layer, "original_module", layer)) not in (nn.Linear, Float32Logits) or layer.bias is not None:
        return None
    if getattr(model.config.get_text_config(), "final_logit_softcapping", None):
        return None
    ids, inner = torch.arange(4, device=layer.weight.device)[None], decoder(model)

    def logits(ids: Tensor) -> Tensor | None:
        states = inner(input_ids=ids).last_hidden_state
        return layer(states).float() if states.dtype == layer.weight.dtype else None

    found = call_as_forward(model, logits, ids)
    same = found is not None and torch.allclose(found, forward(model, input_ids=ids).logits.float())
    return layer if same else None


def attends_to_all(config: Any, max_length: float = math.inf, *, or_carries: bool = False) -> bool:
    """True if, by the configuration, each layer attends to all earlier tokens in sequences of up to `max_length`
    tokens: a window that no sequence fills hides nothing. `or_carries`: or carries a state."""
    window = getattr(config, "sliding_window", None)
    if kinds := getattr(config, "layer_types", None):
        reaches_all = {"full_attention"} | BY_TOKEN | (STATES if or_carries else set())
        return {*kinds} <= reaches_all | ({"sliding_attention"} if window and window >= max_length else set())
    bounds = [window, getattr(config, "attention_chunk_size", None)]
    return all(bound is None or bound >= max_length for bound in bounds)


def random_ids(model: Any, shape: tuple[int, int]) -> Tensor:
    """Token ids to try a model on, always the same, on the CPU. (rows, tokens)"""
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))


def with_image(model: Any, ids: Tensor, longest: int) -> Tensor:
    """Put the smallest image of the run into the rows, from their second token on, if the model reads images and
    prompts of `longest` tokens have room for one. Returns the rows. (rows, tokens)"""
    images = images_of(model)
    if images is None:
        return ids
    number = _smallest(images)
    size = len(tokens := image_ids(images, number))
    if size + 2 <= longest:
        ids[:, 1 : 1 + size] = torch.tensor(tokens)
    return ids


@contextmanager
def shortened(model: Any, length: int, max_length: float) -> Iterator[None]:
    """Inside, a sequence of `length` tokens is to the model what one of `max_length` is outside: lengths from which on
    it computes otherwise are as many times shorter."""
    configs = (decoder(model).config, model.config.get_text_config())
    holders = [vars(each) for each in (*model.modules(), *configs)]
    own = [(holder, name, holder[name]) for holder in holders for name in THRESHOLDS if holder.get(name)]
    factor = length / max_length if length < max_length < math.inf else 1.0
    for holder, name, value in own:
        holder[name] = max(1, int(value * factor))
    try:
        yield
    finally:
        for holder, name, value in own:
            holder[name] = value


@torch.no_grad()
def check_padding(model: Any, max_length: float) -> None:
    """Raises ConfigError if padding on the right changes the hidden states of a row, as it can in sparse attention when
    sequences are longer than the number of keys that it selects: tried on the run's longest sequence, or where that is
    longer than LONGEST, on as many tokens with the model's own lengths shortened. The check is strictest in float32."""
    inner = decoder(model)
    config, width = inner.config, probe_width(inner.config, max_length, LONGEST)
    length = 3 * width // 4
    rows = random_ids(model, (2, length)).to(model.device)
    padded = nn.functional.pad(rows, (0, width - length))

    def states(ids: Tensor) -> Tensor:
        return inner(input_ids=ids, use_cache=False).last_hidden_state

    def differ() -> tuple[Tensor, Tensor]:
        bare = call_as_forward(model, states, rows)
        return bare, call_as_forward(model, states, padded)[:, :length] - bare

    with shortened(model, width, max_length):
        bare, difference = differ()
        allowed = TOLERANCE[bare.dtype] * bare.norm()
        if bare.dtype != torch.float32 and not difference.norm() < allowed:
            # Rounding may send a token to other experts.
            usual, config._attn_implementation = config._attn_implementation, "eager"
            allowed = torch.maximum(allowed, ROUNDING * (differ()[0] - bare).norm())
            config._attn_implementation = usual
    if not bare.isfinite().all():
        raise ConfigError(
            f"{type(model).__name__} gives hidden states that are NaN or infinite for {length} random tokens: its "
            "weights are broken, or too large for its precision; choose another model"
        )
    if not difference.norm() < allowed:
        keys = {key: getattr(config, key, None) for key in THRESHOLDS}
        found = ", ".join(f"{key} = {value}" for key, value in keys.items() if value)
        raise ConfigError(
            f"{type(model).__name__} gives a sequence of {length} tokens other hidden states when it is padded to "
            f"{width}: its log-probabilities would depend on what shares a forward pass with it. Choose another "
            "model"
            + (f", or keep prompt plus completion within what all its layers attend to ({found})" if found else "")
        )


def probed(model: Any) -> int:
    """Tokens of the sequences that two ways to compute are compared on: also of one with an image."""
    images = images_of(model)
    return PROBED if images is None else max(PROBED, 2 * (len(image_ids(images, _smallest(images))) + 4))


def _smallest(images: Images) -> int:
    return int(np.diff(images.starts).argmin())


def probe_width(config: Any, max_length: float, wanted: int) -> int:
    """Tokens of a probe: as many as wanted, within the model's positions and the run's longest sequence."""
    return int(min(wanted, getattr(config, "max_position_embeddings", None) or wanted, max_length))


@torch.no_grad()
def make_packable(model: Any, kinds: Sequence[Kind], *, max_length: float = math.inf) -> tuple[Kind | None, str]:
    """Let the model take packed batches, by the first of these kinds of attention whose hidden states match those of a
    plain forward pass. Returns that kind, or None, and why those before it failed.

    Models with layers that attend to a window only are left as they are. Raises
    torch.OutOfMemoryError if memory runs out, which says nothing about the model.
    """
    config = decoder(model).config
    if not attends_to_all(config, max_length, or_carries=True):
        return None, NOT_TO_ALL
    length = probe_width(config, max_length, probed(model))
    prompt, completion = length // 2, length - length // 2
    ids = with_image(model, random_ids(model, (4, length)), prompt)
    ids[1::2, :prompt] = ids[::2, :prompt]
    sequences = Sequences(ids, torch.full((4,), prompt), torch.full((4,), completion), torch.arange(4) // 2)

    with shortened(model, length, max_length):
        return _first_match(model, kinds, sequences)


def _first_match(model: Any, kinds: Sequence[Kind], sequences: Sequences) -> tuple[Kind | None, str]:
    """Do as `make_packable` says. The sequences are of one length, their prompts too."""
    inner, start = decoder(model), int(sequences.prompt_lengths[0])
    config, (ids, shown) = inner.config, on_device(model, sequences.input_ids)

    def states() -> Tensor:
        with showing(model, shown):
            return hidden_states(model, ids, shown)[:, start - 1 : -1].flatten(0, 1)

    plain, usual = call_as_forward(model, states), config._attn_implementation
    reasons: list[str] = []
    for kind in kinds:
        try:
            use_attention(inner)
            batch = with_images(model, pack_batch(sequences, kind, with_rows=takes_rows(inner)), sequences)
            batch = to_device(batch, model.device)
            # With gradients, so that a kernel that cannot be compiled fails here.
            with torch.set_grad_enabled(kind != "padded"), showing(model, batch.shown):
                packed = call_as_forward(model, packed_states, inner, batch)
                if packed.requires_grad:
                    packed.sum().backward()
            difference, allowed = relative_difference(packed, plain), TOLERANCE[plain.dtype]
            if not difference < allowed:
                config._attn_implementation = "eager"
                allowed = max(allowed, ROUNDING * relative_difference(call_as_forward(model, states), plain))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever another architecture, a kernel or a compiler raises
            reasons.append(f"{kind}: {in_words(error)}")
            continue
        finally:
            config._attn_implementation = usual
        if difference < allowed:
            use_attention(inner)
            return kind, "; ".join(reasons)
        found = f"hidden states differ from a plain pass's by {difference:.2g}, and {allowed:.2g} is allowed"
        reasons.append(f"{kind}: {found}")
    return None, "; ".join(reasons)


def in_words(error: Exception) -> str:
    """Return the error's kind and text, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def why_not_packed(policy: Any) -> str:
    """Reason why packed passes give other gradients than padded rows; "" if they give the same."""
    if not (parameters := _parameters(policy)):
        return ""
    config, dtype = policy.decoder.config, parameters[0].dtype
    packed = _gradient(policy, parameters, PROBED)
    policy.packs, usual = False, config._attn_implementation
    try:
        padded = _gradient(policy, parameters, PROBED)
        difference, allowed = relative_difference(packed, padded), GRADIENT_TOLERANCE[dtype]
        if not difference < allowed and dtype != torch.float32:  # rounding may send a token to other experts
            config._attn_implementation = "eager"
            allowed = max(allowed, ROUNDING * relative_difference(_gradient(policy, parameters, PROBED), padded))
    finally:
        policy.packs, config._attn_implementation = True, usual
    return "" if difference < allowed else f"gradients differ by {difference:.2g}, and {allowed:.2g} is allowed"


def check_recomputing(policy: Any) -> None:
    """Raises ConfigError if recomputed activations change gradients. One sequence is tried, and where memory runs out,
    as it may have done before in the training, a shorter one: torch.OutOfMemoryError if there is no room for any."""
    if not (parameters := _parameters(policy)):
        return
    layers, longest = policy.recomputed, LONGEST
    while True:
        policy.recomputed = 0
        try:
            kept = _gradient(policy, parameters, longest, sequences=1)
            break
        except torch.OutOfMemoryError:
            if longest <= SHORTEST:
                raise
            longest //= 2
        finally:
            policy.recomputed = layers
    difference = relative_difference(_gradient(policy, parameters, longest, sequences=1), kept)
    if not difference < SAME_KERNELS[parameters[0].dtype]:
        raise ConfigError(
            f"{type(policy.master).__name__} has other gradients when activations are computed again, by "
            f"{difference:.0%}: its layers do not give the same twice. Set train.gradient_checkpointing to false, with "
            "a smaller train.max_tokens_per_pass if memory runs out, or choose another model"
        )


def _parameters(policy: Any) -> list[Tensor]:
    """The smallest trained parameters: one at least, up to COMPARED elements. None of a sharded model, whose gradients
    come in shards, nor of a frozen one."""
    if policy.is_sharded:
        return []
    trained = sorted((each for each in policy.model.parameters() if each.requires_grad), key=Tensor.numel)
    filled = torch.tensor([each.numel() for each in trained]).cumsum(0).tolist()
    return [each for place, each in enumerate(trained) if not place or filled[place] <= COMPARED]


def _gradient(policy: Any, parameters: list[Tensor], longest: int, sequences: int = 3) -> Tensor:
    """Gradient of a random projection of hidden states, of the first of three completions of two prompts. The first
    fills the run's longest sequence, or `longest` tokens that are to the model what it is. (elements,)"""
    width = probe_width(policy.decoder.config, policy.max_length, max(longest, probed(policy.model)))
    prompt, completion = width // 2, width - width // 2
    prompts, completions = torch.tensor([prompt, prompt, min(prompt, 3)]), torch.tensor([completion, prompt, 1])
    ids = random_ids(policy.model, (3, width))
    with_image(policy.model, ids[:2], prompt)
    ids[1, :prompt] = ids[0, :prompt]
    tried = (ids, prompts, completions, torch.tensor([0, 0, 1]))
    inputs = policy.prepare(Sequences(*(each[:sequences] for each in tried)))
    with shortened(policy.model, width, policy.max_length), torch.enable_grad(), policy.recomputing():
        states = policy.hidden_states(inputs.tokens)
        generator = torch.Generator().manual_seed(1)
        weights = torch.randn(states.shape, generator=generator).to(states.device)
        found = torch.autograd.grad((states.float() * weights).sum(), parameters, materialize_grads=True)
    return torch.cat([each.float().flatten() for each in found])


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference, relative to that of `expected`; 0 if both are 0."""
    return float((found - expected).norm() / expected.norm()) if expected.any() or found.any() else 0.0
