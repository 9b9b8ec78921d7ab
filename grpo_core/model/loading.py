"""Load and save a causal language model, with or without a LoRA adapter."""

from __future__ import annotations

import copy
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.distributed import DistributedConfig, mixin

from grpo_core.config.inputs import ModelConfig, quantisation_problem
from grpo_core.distributed import (
    copy_into_shard,
    first_own_row,
    gather_if_sharded,
    is_sharded_tensor,
    own_shard,
    shard_like,
)
from grpo_core.errors import ConfigError
from grpo_core.model.capabilities import decoder
from grpo_core.model.checkpoint_fit import misfit, name_as_saved, not_finite
from grpo_core.model.four_bit import dequantised, keep_gradients, nf4_config, take_dequantised
from grpo_core.model.images import Images
from grpo_core.model.logprobs import make_logits_float32
from grpo_core.model.precision import make_bfloat16
from grpo_core.model.pretrained import from_pretrained, give_logits_alone, model_class

# Parts of the names of tensors that bitsandbytes saves beside 4-bit weights.
OF_4BIT = (".weight.absmax", ".weight.quant_", ".weight.nested_")


def load_model(
    path: Path | str,
    revision: str | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    shard: Callable[[Any], None] | None = None,
    in_4bit: bool = False,
    images: Images | None = None,
) -> Any:
    """Load a causal LM with weights of `dtype` (float32 or bfloat16) and float32 logits, without its dropout: the ratio
    of an on-policy update must be exactly 1. Each weight goes straight from the file to the device, without a copy in
    another dtype or place.

    `shard`: applied to the model while it has no weights yet; each process then reads only its own shard of them.
    `in_4bit`: linear layers have 4-bit weights, and compute in `dtype`. `images`: those that it reads. Raises
    ConfigError if the saved weights are not those of the whole model, not finite, or quantised.
    """
    saved = from_pretrained(AutoConfig, path, revision)
    kind = model_class(saved, path, with_images=images is not None)
    if problem := quantisation_problem(saved.to_dict()):
        raise ConfigError(f"{path}: {problem}")
    device = torch.device(device)
    options: dict[str, Any] = {}
    if shard is not None:
        options["distributed_config"] = DistributedConfig(fsdp_size=PartialState().num_processes)
    elif device.type != "cpu":  # where transformers would report offloading
        options["device_map"] = {"": device}
    if in_4bit:
        options["quantization_config"] = nf4_config(dtype)
    with nullcontext() if shard is None else _sharding_by(shard):
        model, found = from_pretrained(
            kind,
            path,
            revision,
            dtype=dtype,
            attn_implementation=attention_of(path, revision),
            ignore_mismatched_sizes=True,  # else transformers raises without a name
            output_loading_info=True,
            **options,
        )
    if problem := misfit(model, found) or not_finite(model):
        raise ConfigError(
            f"{path}: {problem}. Name a sound checkpoint, as transformers' save_pretrained writes it (without a prefix "
            "such as 'module.')"
        )
    if saved.model_type != model.config.model_type:
        name_as_saved(model, path, revision)
    model.eval()
    give_logits_alone(model)
    if shard is not None:
        del model.config.distributed_config  # it would be saved with the model
    elif dtype == torch.bfloat16:
        make_bfloat16(model)  # also what transformers leaves in float32
    keep_gradients(model)
    make_logits_float32(model)
    if images is not None:
        give_images(model, images)
    for module in model.modules():  # some layers apply dropout by a rate of their own
        for name in [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]:
            setattr(module, name, 0.0)
    return model


def give_images(model: Any, images: Images) -> None:
    """Let the model read these images. What is beside its language model and head is not trained, if they say so."""
    model.images = copy.deepcopy(images)  # features are kept by model
    if images.frozen:
        of_text = {id(each) for part in (decoder(model), model.get_output_embeddings()) for each in part.parameters()}
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.requires_grad and id(parameter) in of_text)


@contextmanager
def _sharding_by(shard: Callable[[Any], None]) -> Iterator[None]:
    """Inside, transformers shards what it loads by `shard`, not in its own way: that puts the weight of a head tied to
    the embedding into a unit without the head, so that the head cannot be read."""
    own: Any = mixin.apply_fully_sharded_data_parallelism

    def apply(model: Any, _: Any) -> Any:
        shard(model)
        return model

    module: Any = mixin
    module.apply_fully_sharded_data_parallelism = apply
    try:
        yield
    finally:
        module.apply_fully_sharded_data_parallelism = own


def attention_of(path: Path | str, revision: str | None = None) -> str | None:
    """Return transformers' name of the attention that a model needs: "eager" if it caps its attention scores (Gemma 2,
    VaultGemma), since the fused one ignores the cap; None if transformers may choose."""
    config = from_pretrained(AutoConfig, path, revision).get_text_config()
    return "eager" if getattr(config, "attn_logit_softcapping", None) else None


def with_adapter(model: Any, config: ModelConfig) -> Any:
    """Put the model under a LoRA adapter (arXiv:2106.09685) if the configuration asks for one; the base is frozen.

    The adapter starts as no change at all, its input side drawn from torch's global random state; or, given
    `config.adapter`, as the one in that folder. Modules that are trained whole are float32 copies of the base's. Raises
    ConfigError if the model has no such module, or the module has 4-bit weights; for an adapter of tied weights; and if
    the file's tensors are not the adapter's.
    """
    if not config.use_peft:
        return model
    from peft import LoraConfig, get_peft_model
    from peft.utils import ModulesToSaveWrapper

    _check_modules_to_save(model, config)

    base = [(module, name, p) for module in model.modules() for name, p in module._parameters.items() if p is not None]
    base = [each for each in base if each[2].is_floating_point()]  # not 4-bit codes, whose layers peft has to see
    for module, name, parameter in base:  # an adapter is drawn in the precision of what it adapts
        like = torch.empty((), device=parameter.device).expand(parameter.shape)
        module._parameters[name] = nn.Parameter(like, requires_grad=False)
    adapter = LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        use_rslora=config.use_rslora,
        lora_dropout=config.lora_dropout,
        target_modules=config.lora_target_modules or "all-linear",
        exclude_modules=_not_adapted(model),
        modules_to_save=config.lora_modules_to_save and [*config.lora_modules_to_save],  # peft adds to the list
        # Else a copy of a tied embedding would be trained without the head, or the head without the embedding.
        ensure_weight_tying=bool(config.lora_modules_to_save and model.config.get_text_config().tie_word_embeddings),
    )
    adapted: Any = get_peft_model(model, adapter).eval()
    # Take out what peft has added for a tied head.
    adapted.peft_config["default"].modules_to_save = config.lora_modules_to_save
    for module, name, parameter in base:
        module._parameters[name] = parameter.requires_grad_(False)
    _check_untied(adapted, Counter(id(parameter) for _, _, parameter in base))
    for module in [each for each in adapted.modules() if isinstance(each, ModulesToSaveWrapper)]:
        for own, parameter in zip(
            module.modules_to_save.parameters(), module.original_module.parameters(), strict=True
        ):
            own.data = parameter.float().clone()
    if config.adapter:
        given, own = _read_adapter(adapted, Path(config.adapter)), trainable_state(adapted)
        shapes = [{name: tuple(each.shape) for name, each in tensors.items()} for tensors in (given, own)]
        if unlike := sorted(name for name in given.keys() | own.keys() if shapes[0].get(name) != shapes[1].get(name)):
            found, wanted = (of.get(unlike[0], "absent") for of in shapes)
            raise ConfigError(
                f"model.adapter = {config.adapter!r} is no adapter of this base by the other keys of [model]: "
                f"{unlike[0]} is {found} in its file and {wanted} here, and {len(unlike) - 1} more are unlike; merge "
                "it into its base with peft, and name the result in model.name_or_path"
            )
        load_trainable_state(adapted, given)
    return adapted


def _check_modules_to_save(model: nn.Module, config: ModelConfig) -> None:
    """Raises ConfigError unless the model has each of `lora_modules_to_save`, and can train it."""
    for wanted in config.lora_modules_to_save or ():
        found = [module for name, module in model.named_modules() if name.endswith(wanted)]
        if not found:
            raise ConfigError(
                f"model.lora_modules_to_save names {wanted!r}, but no module of {config.name_or_path} has a name that "
                "ends with it; name one that it has, such as 'embed_tokens' or 'lm_head'"
            )
        if any(not parameter.is_floating_point() for module in found for parameter in module.parameters()):
            raise ConfigError(
                f"model.lora_modules_to_save names {wanted!r} with model.load_in_4bit = true: weights of 4 bits cannot "
                "be trained; name embedding, head or norms only, or set load_in_4bit to false"
            )


def _not_adapted(model: Any) -> str | None:
    """Regular expression of the linear layers that get no adapter; None if there are none. Those beside the text model
    and its head, such as those in a tower for images, would not be trained by text."""
    of_text = decoder(model), model.get_output_embeddings()
    text = [name for name, module in model.named_modules() if module in of_text]
    beside = rf"(?!({'|'.join(map(re.escape, text))})(\.|$)).*"
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    found = [beside] * any(re.fullmatch(beside, name) for name in linear)
    return "|".join(found + [re.escape(name) for name, layer in linear.items() if not _gives_product(layer)]) or None


def _gives_product(layer: nn.Linear) -> bool:
    """False if a layer of transformers' own gives more than a linear one, as the routers of Llama 4 and Phi-3.5-MoE do,
    or takes other inputs: an adapter would add to that."""
    if type(layer).forward is nn.Linear.forward or not type(layer).__module__.startswith("transformers.models."):
        return True
    weights = {name: torch.empty(each.shape, device="meta") for name, each in layer.named_parameters()}
    try:
        return isinstance(functional_call(layer, weights, torch.empty(1, layer.in_features, device="meta")), Tensor)
    except (RuntimeError, TypeError):  # of shapes or arguments
        return False


def _check_untied(adapted: nn.Module, holders: Mapping[int, int]) -> None:
    """Raises ConfigError for an adapter of weights that several modules hold. `holders`: how many, by the id of the
    weights."""
    for name, module in adapted.named_modules():
        if hasattr(module, "get_delta_weight") and holders[id(_adapted_weight(module))] > 1:
            own = name.removeprefix("base_model.model.")
            raise ConfigError(
                f"model.lora_target_modules puts an adapter on {own}, whose weights are tied to another module's: "
                "merged into them it would change both, and the saved model would not be the trained one. Leave "
                f"{own.rpartition('.')[2]!r} out, or train it whole: lora_modules_to_save = ['embed_tokens']"
            )


def _adapted_weight(module: Any) -> Tensor:
    """Weights that a module of peft adapts. It names the parameter where experts are one tensor."""
    return getattr(module.get_base_layer(), getattr(module, "parameter_name", "weight"))


def saved_name(name: str) -> str:
    """Name that a parameter of an adapter has in the adapter's file."""
    return name.replace(".modules_to_save.default.", ".").replace(".default.", ".")


def _read_adapter(adapted: nn.Module, folder: Path) -> dict[str, Tensor]:
    """Read the adapter in the folder, by the names of `trainable_state`. Its file has tied modules twice."""
    saved = load_file(folder / "adapter_model.safetensors")
    every = {name for name, each in adapted.named_parameters(remove_duplicate=False) if each.requires_grad}
    names = {saved_name(name): name for name in every}
    found = {names.get(name, name): tensor for name, tensor in saved.items()}
    return {name: tensor for name, tensor in found.items() if name not in every - trainable_state(adapted).keys()}


def load_starting_policy(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    shard: Any = None,
    images: Images | None = None,
) -> Any:
    """Load the policy that a training starts from, without an adapter: the base as it was given, or the base that the
    training holds with `config.adapter` merged in float32 and then rounded to `dtype`; a sharded one is rounded as its
    weights are gathered."""
    merges = config.adapter is not None
    held = torch.float32 if merges else dtype
    model = load_model(config.name_or_path, config.revision, dtype=held, device=device, shard=shard, images=images)
    if merges:
        if config.load_in_4bit:
            take_dequantised(
                model, load_model(config.name_or_path, config.revision, dtype=dtype, device=device, in_4bit=True)
            )
        adapted = with_adapter(model, config)
        model = adapted.merge_and_unload() if shard is None else _merge_into_shards(adapted)
    return make_bfloat16(model) if merges and dtype == torch.bfloat16 and shard is None else model


@torch.no_grad()
def _merge_into_shards(adapted: Any) -> Any:
    """Return the base of a sharded model, with the adapter's changes in each process's shards."""
    for _, tensor, changes in _named_weights(adapted):
        for change in changes:
            tensor += shard_like(tensor, change())
    return adapted.unload()


def adapter_dropouts(model: nn.Module) -> list[nn.Dropout]:
    """Dropout layers of a model's adapter, which act in training mode only."""
    layers = [each for module in model.modules() for each in getattr(module, "lora_dropout", nn.ModuleDict()).values()]
    return [layer for layer in layers if isinstance(layer, nn.Dropout)]


@contextmanager
def other_weights(model: nn.Module, state: dict[str, Tensor]) -> Iterator[None]:
    """Inside, the model has the weights of a `trainable_state` instead of its own."""
    own = copy_of_trainable_state(model)
    try:
        load_trainable_state(model, state)
        yield
    finally:
        load_trainable_state(model, own)


def trainable_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that training changes, by name: all of them, or the adapter's."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def copy_of_trainable_state(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of `trainable_state`."""
    return {name: parameter.clone() for name, parameter in trainable_state(model).items()}


@torch.no_grad()
def load_trainable_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Copy a `trainable_state` into the model."""
    own = trainable_state(model)
    if own.keys() != state.keys():
        raise ValueError(f"the saved parameters are not the model's: {sorted(own.keys() ^ state.keys())[:5]}")
    for name, parameter in own.items():
        copy_into_shard(state[name], parameter)


@torch.no_grad()
def whole_weights(model: Any, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the current weights one after the other, by their names in the base model, with an adapter's changes added.
    A sharded model's are gathered one by one: all processes go through them.

    `dtype`: of the weights; default: the model's. Weights that need no conversion are the model's own memory. A head
    that is tied to the embedding comes under both names: given only the embedding, vLLM on a CPU would go on with a
    packed copy of the old head.
    """
    for name, tensor, changes in _named_weights(model):
        wanted = dtype if dtype and isinstance(tensor, nn.Parameter) else tensor.dtype  # buffers stay as they are
        weights = gather_if_sharded(tensor.detach().to(wanted))
        for change in changes:
            weights = (weights + change()).to(wanted)
        yield name, weights


@torch.no_grad()
def weight_shards(model: Any, dtype: torch.dtype) -> Iterator[tuple[str, int, Tensor]]:
    """Yield this process's shards of `whole_weights`: name, number of the first row, and the rows. Nothing is gathered.
    Tensors that are not sharded come whole from the main process and are left out by the others."""
    for name, tensor, changes in _named_weights(model):
        wanted = dtype if isinstance(tensor, nn.Parameter) else tensor.dtype
        found = tensor.detach().to(wanted)
        for change in changes:
            found = (found + shard_like(found, change())).to(wanted)
        if is_sharded_tensor(found):
            yield name, first_own_row(found), own_shard(found)
        elif PartialState().is_main_process:
            yield name, 0, found


def _named_weights(model: Any) -> Iterator[tuple[str, Tensor, list[Callable[[], Tensor]]]]:
    """Yield each weight by its name in the base model, with functions that compute the changes that adapters add to it,
    each as large as the weight."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    changes: dict[int, list[Callable[[], Tensor]]] = defaultdict(list)
    for module in base.modules():
        if hasattr(module, "get_delta_weight"):
            found = [partial(module.get_delta_weight, adapter) for adapter in module.active_adapters]
            changes[id(_adapted_weight(module))] += found
    for name, tensor in base.state_dict(keep_vars=True).items():
        if not any(part in name for part in (".lora_", ".original_module.", *OF_4BIT)):
            own = name.replace(".base_layer", "").replace(".modules_to_save.default", "")
            yield own, dequantised(tensor), changes.get(id(tensor), [])


def in_checkpoint_layout(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights named and divided as in checkpoints, which vLLM's loaders know: in transformers 5, the experts of a
    layer are one tensor."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not getattr(base, "_weight_conversions", None):
        yield from weights
        return
    for name, tensor in weights:
        yield from revert_weight_conversion(base, {name: tensor}).items()


def base_weights(model: Any) -> dict[str, Tensor]:
    """Return only the frozen weights under an adapter, by their names in the base model; in the model's own memory,
    except those of 4 bits, which are dequantised."""
    state = model.get_base_model().state_dict(keep_vars=True)
    named = {name: each for name, each in state.items() if not any(part in name for part in (".lora_", *OF_4BIT))}
    return {name.replace(".base_layer", ""): dequantised(tensor).detach() for name, tensor in named.items()}


def copy_of_whole_weights(model: Any) -> dict[str, Tensor]:
    """Return a copy of all `whole_weights`; weights that share memory do so here too."""
    live = {own_shard(parameter).data_ptr() for parameter in model.parameters()}
    copies: dict[int, Tensor] = {}
    found = {}
    for name, tensor in whole_weights(model):
        place = tensor.data_ptr()
        if place not in copies:
            copies[place] = tensor.clone() if place in live else tensor
        found[name] = copies[place]
    return found
