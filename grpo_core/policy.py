"""The policy: load the model, LoRA, and the log-probabilities of completions under it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float32, Int
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_core.batching import Sequences
from grpo_core.head import chosen_logprobs
from grpo_core.packing import line_up, packed_states, use_attention
from grpo_core.precision import in_float32, refresh, working_copy
from grpo_core.sections import ModelConfig

PROBED = 100  # tokens that ways to compute a sequence are compared over: several blocks of flex attention
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03}  # relative, between two ways to compute the same


def load_model(path: Path | str, revision: str | None = None) -> Any:
    """A causal LM with float32 weights, dropout off: the ratio of an on-policy update must be exactly 1."""
    model = AutoModelForCausalLM.from_pretrained(
        path, revision=revision, dtype=torch.float32, attn_implementation=attention_of(path, revision)
    ).eval()
    for module in model.modules():  # some layers apply dropout by a rate of their own
        for name in [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]:
            setattr(module, name, 0.0)
    return model


def attention_of(path: Path | str, revision: str | None = None) -> str | None:
    """transformers' attention that a model needs: "eager" if it caps its attention scores (Gemma 2, VaultGemma), since
    the fused one ignores the cap; None where transformers may choose."""
    config = AutoConfig.from_pretrained(path, revision=revision).get_text_config()
    return "eager" if getattr(config, "attn_logit_softcapping", None) else None


def with_adapter(model: Any, config: ModelConfig) -> Any:
    """The model under a LoRA adapter (arXiv:2106.09685) where the configuration asks for one; the base is frozen.

    The adapter starts as no change at all. Its input side is drawn from torch's global random state.
    """
    if not config.use_peft:
        return model
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules=config.lora_target_modules or "all-linear",
    )
    return get_peft_model(model, adapter).eval()


def without_adapter(model: Any) -> AbstractContextManager[None]:
    """The base model for the length of a `with`: the reference policy of a LoRA training, with no second copy."""
    return model.disable_adapter()


def trainable_state(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that training moves, by name: all of them, or the adapter's."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def load_trainable_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Copy what `trainable_state` gave into the model."""
    own = trainable_state(model)
    if own.keys() != state.keys():
        raise ValueError(f"the saved parameters are others than the model's: {sorted(own.keys() ^ state.keys())[:5]}")
    for name, parameter in own.items():
        parameter.copy_(state[name])


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model that transformers and vLLM load as it is; an adapter is merged into its base, in place, and kept
    in a folder `adapter` beside."""
    if hasattr(model, "merge_and_unload"):
        # Left to itself, peft asks the hub whether the embedding was resized.
        model.save_pretrained(folder.with_name("adapter"), save_embedding_layers=False)
        model = model.cpu().merge_and_unload()  # the base may be there already, see `precision`
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def plain_weights(model: Any) -> dict[str, Tensor]:
    """Copies of the weights as they are now, by their names in the base model; an adapter's change is added to what it
    adapts.

    What shares its memory is copied once, a head that is tied to the embedding under both names: vLLM on a CPU, when it
    gets only the embedding, goes on with a packed copy of the old head.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    weights = {name: tensor for name, tensor in base.state_dict().items() if ".lora_" not in name}
    copies = {tensor.data_ptr(): tensor.clone() for tensor in weights.values()}
    for module in base.modules():
        if hasattr(module, "get_delta_weight"):
            # Of experts that are one tensor, peft adapts the parameter and names which; else it is a layer's weight.
            parameter = getattr(module.get_base_layer(), getattr(module, "parameter_name", "weight"))
            for adapter in module.active_adapters:
                copies[parameter.data_ptr()] += module.get_delta_weight(adapter)
    return {name.replace(".base_layer", ""): copies[tensor.data_ptr()] for name, tensor in weights.items()}


def decoder(model: Any) -> Any:
    """What gives the last hidden states, with the adapter in place if there is one."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = base.get_decoder()
    return base.model if found is base else found  # transformers does not find that of Llama 4's text model


@torch.no_grad()
def plain_output_layer(model: Any) -> nn.Linear | None:
    """The linear layer that makes the logits of the decoder's output, where that is all there is to it.

    None for models that scale or cap their logits, or whose output layer is adapted or has a bias: there the model
    itself has to make them.
    """
    layer = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if type(layer) is not nn.Linear or layer.bias is not None:
        return None
    if getattr(model.config.get_text_config(), "final_logit_softcapping", None):
        return None
    ids = torch.arange(4, device=layer.weight.device)[None]
    same = torch.allclose(layer(decoder(model)(input_ids=ids).last_hidden_state), model(input_ids=ids).logits)
    return layer if same else None


def attends_to_all(config: Any, max_length: float = math.inf) -> bool:
    """Whether each layer attends to all tokens before, as far as the configuration says, in sequences of up to
    `max_length` tokens: a window that no sequence fills hides nothing."""
    window = getattr(config, "sliding_window", None)
    if kinds := getattr(config, "layer_types", None):
        reaches_all = {"full_attention"} | ({"sliding_attention"} if window and window >= max_length else set())
        return set(kinds) <= reaches_all
    bounds = [window, getattr(config, "attention_chunk_size", None)]
    return all(bound is None or bound >= max_length for bound in bounds)


@torch.no_grad()
def check_padding(model: Any, max_length: float) -> None:
    """Raises ValueError if padding on the right changes the hidden states of a row, as it can in sparse attention when
    sequences are longer than the number of keys that it selects. `model`: in float32, where rounding explains less."""
    config = decoder(model).config
    selected = getattr(config, "index_topk", None) or 0  # keys that DeepSeek's sparse attention selects
    width = _probe_width(config, max_length, max(PROBED, 2 * selected))
    length = 3 * width // 4
    row = torch.arange(width, device=model.device).remainder(config.vocab_size)[None]
    padded = row.repeat(2, 1)
    padded[1, length:] = 0
    bare = decoder(model)(input_ids=row[:, :length], use_cache=False).last_hidden_state[0]
    states = decoder(model)(input_ids=padded, use_cache=False).last_hidden_state[1, :length]
    if not (states - bare).norm() < TOLERANCE[torch.float32] * bare.norm():
        raise ValueError(
            f"{type(model).__name__} gives a sequence of {length} tokens other hidden states when it is padded to "
            f"{width}: its log-probabilities would depend on what shares a forward pass with it. Choose another "
            "model" + (f", or keep prompt plus completion within {selected} tokens (index_topk)" if selected else "")
        )


def _probe_width(config: Any, max_length: float, wanted: int) -> int:
    """Tokens of a probe: as many as wanted, within the model's positions and the run's longest sequence."""
    return int(min(wanted, getattr(config, "max_position_embeddings", None) or wanted, max_length))


@torch.no_grad()
def make_packable(model: Any, *, flex: bool, max_length: float = math.inf) -> bool:
    """Let the model take lines of tokens; whether these have the hidden states of a plain pass.

    Not so for layers that attend to a window only, or that carry a state: they stay as they are.
    """
    config = decoder(model).config
    if not attends_to_all(config, max_length):
        return False
    length = _probe_width(config, max_length, PROBED)
    prompt, completion = length // 2, length - length // 2
    ids = torch.arange(2 * (prompt + completion)).remainder(config.vocab_size).view(2, -1).repeat_interleave(2, 0)
    ids[1::2, prompt + 1 :] = 0
    states = decoder(model)(input_ids=ids.to(model.device), use_cache=False).last_hidden_state
    plain = states[:, prompt - 1 : -1].flatten(0, 1)
    usual = config._attn_implementation
    try:
        use_attention(config)
        sequences = Sequences(ids, torch.full((4,), prompt), torch.full((4,), completion))
        line = line_up(sequences, model.device, flex=flex)
        with torch.set_grad_enabled(flex):  # a kernel that cannot be compiled is to fail here
            packed = packed_states(decoder(model), line)
        if packed.requires_grad:
            packed.sum().backward()
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):  # another attention
        packed = torch.full_like(plain, torch.nan)
    if (plain - packed.detach()).norm() < TOLERANCE[plain.dtype] * plain.norm():
        return True
    config._attn_implementation = usual
    return False


def _of_logits(
    logits: Float32[Tensor, "N V"], targets: Int[Tensor, " N"]
) -> tuple[Float32[Tensor, " N"], Float32[Tensor, " N"]]:
    log_p = logits.log_softmax(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


class Policy(nn.Module):
    """A causal LM whose forward gives what the loss needs.

    `master` has the weights that an optimizer moves; `model` computes, and is the same, or a bfloat16 copy of it.
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
    ):
        super().__init__()
        self.master = master
        self.model = model = working_copy(master) if bf16 else master
        self.temperature = temperature
        self.output_layer = plain_output_layer(model)
        self.flex = next(model.parameters()).is_cuda
        # In float32, where routing of experts does not differ by rounding; kernels are tried in the dtype they are for.
        with nullcontext() if self.flex else in_float32(model):
            self.packs = self.output_layer is not None and make_packable(model, flex=self.flex, max_length=max_length)
        self.zero_grad()
        self.recomputable = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        self.recomputed = 0
        if gradient_checkpointing:
            if not self.recomputable:
                raise ValueError(
                    f"gradient_checkpointing=true: {type(model).__name__} has no layers that transformers can "
                    "recompute; turn it off"
                )
            self.recompute(len(self.recomputable))

    def forward(
        self, sequences: Sequences, *, entropy_gradient: bool = False
    ) -> tuple[Float32[Tensor, "B T"], Float32[Tensor, "B T"]]:
        """Log-probability of each completion token, at the sampling temperature, and the entropy there.

        float32 whatever the model's dtype; 0 past a completion's end. The entropy has a gradient only when asked to.
        """
        # Indices are made on the CPU, where the lengths are: asking a device for a size would wait for all of its work.
        device, lengths = next(self.model.parameters()).device, sequences.completion_lengths
        rows, offsets = (torch.arange(int(lengths.max())) < lengths[:, None]).nonzero(as_tuple=True)
        positions = sequences.prompt_lengths[rows] - 1 + offsets  # each predicts the token after it
        targets = sequences.input_ids[rows, positions + 1].to(device)
        predicts = (rows * sequences.input_ids.shape[1] + positions).to(device)
        with self._checkpointing():
            if self.output_layer is None:
                logits = self.model(input_ids=sequences.input_ids.to(device), use_cache=False).logits.flatten(0, 1)
                logprobs, entropy = _of_logits(logits[predicts].float() / self.temperature, targets)
            else:
                if self.packs:
                    line = line_up(sequences, device, flex=self.flex)
                    hidden = packed_states(decoder(self.model), line)  # (N, h)
                else:
                    ids = sequences.input_ids.to(device)
                    states = decoder(self.model)(input_ids=ids, use_cache=False).last_hidden_state
                    hidden = states.flatten(0, 1).index_select(0, predicts)
                logprobs, entropy = chosen_logprobs(hidden, self.output_layer.weight, targets, self.temperature)
        if not entropy_gradient:
            entropy = entropy.detach()
        inside = rows.to(device), offsets.to(device)
        empty = torch.zeros(len(lengths), int(lengths.max()), device=device)
        return empty.index_put(inside, logprobs), empty.index_put(inside, entropy)

    def refresh(self) -> None:
        """Bring the copy that computes up to date with the masters."""
        if self.model is not self.master:
            refresh(self.model, self.master)

    def recompute(self, layers: int) -> None:
        """Compute the activations of the first `layers` layers again in the backward pass, instead of keeping them."""
        if self.recomputed == 0 < layers:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.recomputed = layers

    def at(self, temperature: float) -> Policy:
        """The same policy at another temperature."""
        other = copy.copy(self)
        other.temperature = temperature
        return other

    @contextmanager
    def _checkpointing(self) -> Iterator[None]:
        """transformers recomputes activations only in layers in training mode; their parts stay in evaluation mode, so
        that no dropout comes on. Outside, sampling with the same model needs the layers' key-value cache, which
        recomputing turns off."""
        for layer in self.recomputable[: self.recomputed]:
            layer.training = torch.is_grad_enabled()
        try:
            yield
        finally:
            for layer in self.recomputable[: self.recomputed]:
                layer.training = False
