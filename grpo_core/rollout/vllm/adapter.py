"""A LoRA adapter for vLLM: whether vLLM takes it beside its own base, how it is sent, and how a worker loads it.

vLLM loads adapters from folders. Here a worker holds the tensors that the trainer sent, and gives them to vLLM when
vLLM asks for its one adapter, so that loading, slots and kernels stay vLLM's own.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from grpo_core.planning.adapter import EXPERTS, VLLM_LORA_RANKS

if TYPE_CHECKING:  # whatever starts a server imports this without torch
    from torch import Tensor

    from grpo_core.config.inputs import ModelConfig
    from grpo_core.rollout.checksums import Received

ADAPTER = "policy"  # vLLM's name for the adapter


def sends_adapter_alone(config: ModelConfig) -> bool:
    """True if vLLM gets the adapter beside its own base. Otherwise it gets the weights with the adapter merged: vLLM
    computes adapters of a mixture of experts by Triton kernels only, which a CPU does not run, and takes no embedding
    or head that is trained whole, nor a rank above the last of VLLM_LORA_RANKS; and of a multimodal base it holds the
    whole, where layers have other names than in a training of the text model alone."""
    if not config.use_peft or config.lora_modules_to_save or config.lora_r > VLLM_LORA_RANKS[-1]:
        return False
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    from grpo_core.model.pretrained import from_pretrained

    whole = from_pretrained(AutoConfig, config.name_or_path, config.revision)
    trained: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(whole)]
    return trained.config_class is type(whole) and not any(
        getattr(whole.get_text_config(), name, None) for name in EXPERTS
    )


def supported_rank(rank: int) -> int:
    """Return the smallest rank of vLLM's that has room for an adapter of this one, which `sends_adapter_alone`."""
    return next(allowed for allowed in VLLM_LORA_RANKS if rank <= allowed)


def adapter_of(model: Any, dtype: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a model's adapter: peft's configuration as JSON values, and tensors by peft's names, copied to the CPU."""
    from grpo_core.model.loading import saved_name, trainable_state

    values = model.peft_config["default"].to_dict()
    config = {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()}
    state = trainable_state(model)
    return config, {saved_name(name): each.to("cpu", dtype, copy=True) for name, each in state.items()}


def hold_adapter(worker: Any, config: dict[str, Any], tensors: dict[str, Tensor], received: Received) -> None:
    """Make a worker of vLLM load this adapter when vLLM next asks for one, and note it in `received`."""
    manager = worker.model_runner.lora_manager
    manager._load_adapter = partial(_adapter_from_tensors, manager, config, tensors, received)


def _adapter_from_tensors(
    manager: Any, config: dict[str, Any], tensors: dict[str, Tensor], received: Received, request: Any
) -> Any:
    """Make of tensors what vLLM's manager of adapters would make of an adapter's folder."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    from grpo_core.rollout.checksums import noted

    helper = PEFTHelper.from_dict(config)
    helper.validate_legal(manager.lora_config)
    layers = manager._adapter_manager
    mapper = getattr(layers.model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        lora_model_id=request.lora_int_id,
        tensors=dict(noted(tensors.items(), received.notes, received.note)),
        peft_helper=helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=mapper and mapper.get_rename_mapper(),
    )
    # vLLM would pass over modules that it does not know.
    received.unknown = adapter.loras.keys() - layers.modules.keys() - {*chain(*layers.packed_modules.values())}
    return adapter
