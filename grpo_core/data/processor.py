"""The processor of a model that reads images: its image processor and tokenizer, without the part for videos.

transformers makes the processors of most families only where torchvision is installed, for their videos, and then
resizes images by other code. Here images are resized by Pillow everywhere: one image gives the same pixels and the same
number of tokens on each machine.
"""

from __future__ import annotations

from typing import Any

from grpo_core.config.inputs import ModelConfig
from grpo_core.data.prompts import load_tokenizer
from grpo_core.errors import ConfigError
from grpo_core.system.processes import importing


def takes_images(config: ModelConfig) -> bool:
    """True if transformers has a class by which this model reads images and text."""
    with importing():
        from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig

        from grpo_core.model.pretrained import from_pretrained

    return (
        type(from_pretrained(AutoConfig, config.name_or_path, config.revision)) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    )


def load_processor(config: ModelConfig) -> Any:
    """Load the model's processor. Raises ConfigError for a model that reads no images, and for one without a chat
    template or with no files of an image processor."""
    with importing():
        import transformers
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

        from grpo_core.model.pretrained import from_pretrained

    name = f"model.name_or_path = {config.name_or_path!r}"
    model = from_pretrained(transformers.AutoConfig, config.name_or_path, config.revision)
    family = getattr(transformers, PROCESSOR_MAPPING_NAMES.get(model.model_type) or "", None)
    if not takes_images(config) or family is None:
        raise ConfigError(
            f"{name}: the data have images, and a {model.model_type} reads text alone; name a model that reads images, "
            "such as Gemma 3 or Qwen2.5-VL, or take the images out of the data"
        )
    kind = _without_video(family)
    try:
        pictures = from_pretrained(transformers.AutoImageProcessor, config.name_or_path, config.revision, backend="pil")
        values, _ = kind.get_processor_dict(config.name_or_path, revision=config.revision)
        processor = kind.from_args_and_dict([pictures, load_tokenizer(config)], values)
    except Exception as error:  # their code reads files that anyone may have written
        raise ConfigError(
            f"{name}: its processor, which images are read by, cannot be loaded: {error}. A model's folder holds it as "
            "preprocessor_config.json or processor_config.json"
        ) from error
    processor.chat_template = processor.chat_template or processor.tokenizer.chat_template
    if not processor.chat_template:
        raise ConfigError(f"{name} has no chat template, which images need; use an instruction-tuned model")
    return processor


def _without_video(family: Any) -> Any:
    """A family's processor that is made of the image processor and the tokenizer alone."""
    parts = [part for part in family.get_attributes() if "video" not in part]
    return type(family.__name__, (family,), {"get_attributes": classmethod(lambda cls: parts)})
