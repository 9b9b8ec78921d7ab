"""Load and save a causal language model, with or without a LoRA adapter."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_core.config.inputs import ModelConfig
from grpo_core.model.precision import in_bfloat16


def load_model(
    path: Path | str,
    revision: str | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Any:
    """A causal LM with weights of `dtype` (float32 or bfloat16), dropout off: the ratio of an on-policy update must be
    exactly 1. Each weight goes straight from the file to the device, without a copy in another dtype or place."""
    device = torch.device(device)
    model = AutoModelForCausalLM.from_pretrained(
        path,
        revision=revision,
        dtype=dtype,
        device_map=None if device.type == "cpu" else {"": device},  # of the CPU, transformers would speak of offloading
        attn_implementation=attention_of(path, revision),
    ).eval()
    if dtype == torch.bfloat16:
        in_bfloat16(model)  # also what transformers leaves in float32
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

    base = [(parameter, parameter.data) for parameter in model.parameters()]
    for parameter, _ in base:  # an adapter is drawn in the precision of what it adapts
        parameter.data = parameter.new_empty((), dtype=torch.float32).expand(parameter.shape)
    adapter = LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules=config.lora_target_modules or "all-linear",
    )
    adapted = get_peft_model(model, adapter).eval()
    for parameter, data in base:
        parameter.data = data
    return adapted


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


def save_model(model: Any, tokenizer: Any, folder: Path, config: ModelConfig) -> None:
    """Write a model that transformers and vLLM load as it is. An adapter is written to a folder `adapter` beside it,
    and merged into the float32 base, which is loaded for that: the training may hold a bfloat16 one."""
    if config.use_peft:
        from peft import PeftModel

        adapter = folder.with_name("adapter")
        # Left to itself, peft asks the hub whether the embedding was resized.
        model.save_pretrained(adapter, save_embedding_layers=False)
        base = load_model(config.name_or_path, config.revision)
        model = PeftModel.from_pretrained(base, adapter).merge_and_unload()
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
