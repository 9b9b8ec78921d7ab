"""Read models and tokenizers as data: in a terminal, transformers asks whether to run Python code beside the weights,
unless it is told that the answer is no. And the length up to which a model computes a sequence in one way, whatever
shares a forward pass with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpo_core.errors import ConfigError

# What a checkpoint's config.json may ask of each pass, and the value with which it gives the logits alone, by name.
LOGITS_ALONE = {
    "return_dict": True,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_router_logits": False,
}


def from_pretrained(kind: Any, path: Path | str, revision: str | None = None, **options: Any) -> Any:
    """Load what one of transformers' Auto classes finds in a folder or hub repository. Raises ValueError if that needs
    Python code of its own."""
    try:
        return kind.from_pretrained(path, revision=revision, trust_remote_code=False, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(f"{path} needs Python code of its own, and no code of a model runs here") from None


def model_class(config: Any, path: Path | str, *, with_images: bool = False) -> Any:
    """transformers' Auto class that makes a model of this configuration: for text alone, or, where it has none for
    that or `with_images`, for images too. Raises ConfigError if it has none."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as OF_TEXT
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as OF_IMAGES
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if type(config) in OF_TEXT and not with_images:
        return AutoModelForCausalLM
    if type(config) in OF_IMAGES:
        return AutoModelForImageTextToText
    if with_images:
        raise ConfigError(
            f"{path}: the prompts have images, and transformers has no class by which a {config.model_type} reads "
            "them; name a vision-language model, such as Qwen2.5-VL or Gemma 3, or leave the images out"
        )
    raise ConfigError(
        f"{path}: transformers has no class by which a {config.model_type} is trained on text; name a text model, or a "
        "vision-language one, such as Qwen2.5-VL or Gemma 3"
    )


def from_config(config: Any, *, with_images: bool = False, **options: Any) -> Any:
    """Make a model of this configuration without weights of its own, see `model_class` and `give_logits_alone`."""
    kind = model_class(config, config.name_or_path, with_images=with_images)
    model = kind.from_config(config, trust_remote_code=False, **options)
    give_logits_alone(model)
    return model


def without_weights(config: Any) -> Any:
    """Make a causal language model of this configuration whose weights take no memory."""
    import torch

    with torch.device("meta"):
        return from_config(config)


def give_logits_alone(model: Any) -> None:
    """Make the model's passes give the logits by name, and nothing beside them that its configuration asks for. What
    that was is kept as `model.asked_outputs`: (name of the part, "" for the whole; key; value)."""
    whole, text = model.config, model.config.get_text_config()
    parts = {"": whole} | {name: text for name, part in vars(whole).items() if part is text}
    model.asked_outputs = [
        (name, key, getattr(part, key))
        for name, part in parts.items()
        for key, alone in LOGITS_ALONE.items()
        if bool(getattr(part, key, alone)) != alone
    ]
    for name, key, _ in model.asked_outputs:
        setattr(parts[name], key, LOGITS_ALONE[key])


def ask_again(model: Any, folder: Path) -> None:
    """Write into the config.json of a saved model what `give_logits_alone` has taken out of the model's."""
    if not (asked := getattr(model, "asked_outputs", [])):  # a module that no checkpoint was loaded into has none
        return
    file = folder / "config.json"
    values = json.loads(file.read_text())
    for name, key, value in asked:
        (values[name] if name else values)[key] = value
    file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def usable_positions(config: Any) -> int | None:
    """Largest number of tokens of a sequence: the model's positions, or, with RoPE of type dynamic or longrope, those
    before its frequencies change. None: no limit.

    transformers chooses such frequencies by the longest sequence of a forward pass. Beyond that length, the
    log-probabilities of one sequence would depend on the others.
    """
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]
    unchanged = [
        kind["original_max_position_embeddings"] if kind["rope_type"] == "longrope" else positions
        for kind in kinds
        if kind["rope_type"] in ("dynamic", "longrope")
    ]
    return min([bound for bound in (positions, *unchanged) if bound is not None], default=None)


def check_context(config: Any, max_length: int) -> None:
    """Raises ConfigError if the longest prompt plus completion of a run, in tokens, exceeds `usable_positions`."""
    positions = usable_positions(config)
    if positions is not None and max_length > positions:
        raise ConfigError(
            f"the longest prompt plus completion has {max_length} tokens, and the model takes {positions} (with RoPE "
            "of type dynamic or longrope: those before its frequencies change): lower max_completion_length, or leave "
            "out the longest prompts"
        )
