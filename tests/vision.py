"""Small models that read images, each with its family's tokens, chat template and processor; and pictures for them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers.processors import TemplateProcessing

from tests.grpo_core.environments.templates import make_tokenizer, template_of

QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
GEMMA = ("<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>")
SPECIAL = {"qwen2_5_vl": (*QWEN, "<|video_pad|>"), "gemma3": GEMMA}
END = {"qwen2_5_vl": "<|im_end|>", "gemma3": "<end_of_turn>"}
FAMILIES = [*SPECIAL]
TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 272, "max_position_embeddings": 1024}
CONFIG: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": TEXT
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}},
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 4,
            "out_hidden_size": 32,
        },
        "image_token_id": 256 + 5,
        "video_token_id": 256 + 6,
        "vision_start_token_id": 256 + 3,
        "vision_end_token_id": 256 + 4,
    },
    "gemma3": {
        "text_config": TEXT | {"head_dim": 8},
        "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
        | {"image_size": 28, "patch_size": 7},
        "mm_tokens_per_image": 4,
        "boi_token_index": 256 + 3,
        "eoi_token_index": 256 + 4,
        "image_token_index": 256 + 5,
    },
}


def make_vision_base(folder: Path, family: str, *, weights: bool = False) -> Path:
    """Save a tiny model of the family; `weights`: with random ones."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    config = CONFIG_MAPPING[family](**CONFIG[family])
    config.save_pretrained(folder)
    if weights:
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tokenizer = make_tokenizer(template_of(family), SPECIAL[family], END[family])
    if family == "gemma3":  # puts its begin token before each text
        begin = [("<bos>", tokenizer.bos_token_id)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=begin)
    tokenizer.save_pretrained(folder)
    if family == "gemma3":
        file = folder / "tokenizer_config.json"
        named = {"boi_token": GEMMA[3], "eoi_token": GEMMA[4], "image_token": GEMMA[5]}
        file.write_text(json.dumps(json.loads(file.read_text()) | named))
        size: Any = {"height": 28, "width": 28}
        (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": 4}))
    else:
        size = {"shortest_edge": 28 * 28, "longest_edge": 12 * 28 * 28}
    kind = "Gemma3ImageProcessor" if family == "gemma3" else "Qwen2VLImageProcessor"
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": kind, "size": size}))
    return folder


def picture(width: int = 30, height: int = 20, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """A picture like no other."""
    import numpy as np

    pixels = np.random.default_rng([width, height, seed]).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def png(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """The picture as a file."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()
