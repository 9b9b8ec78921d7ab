"""Small random models that read images, images of random pixels, and what transformers itself computes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from grpo_core.model.images import Images
from grpo_core.model.loading import give_images

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOWER = {"hidden_size": 32, "intermediate_size": 64}
IMAGE = 99  # the families' placeholder
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": TEXT
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}},
        "vision_config": TOWER
        | {"depth": 2, "num_heads": 4, "out_hidden_size": 32, "window_size": 56, "fullatt_block_indexes": [1]},
        "image_token_id": IMAGE,
        "video_token_id": 91,
        "vision_start_token_id": 92,
        "vision_end_token_id": 93,
    },
    "gemma3": {
        "text_config": TEXT | {"head_dim": 8, "sliding_window": 512},
        "vision_config": TOWER | {"num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28, "patch_size": 7},
        "mm_tokens_per_image": 4,
        "boi_token_index": 92,
        "eoi_token_index": 93,
        "image_token_id": IMAGE,
    },
}
GRIDS = torch.tensor([[1, 4, 6], [1, 4, 4], [1, 2, 8], [1, 6, 6]])  # patches of images, in Qwen2.5-VL


def make_seeing(family: str, seed: int = 0, *, frozen: bool = True) -> Any:
    """A random model of the family that has four images of random pixels."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**FAMILIES[family])
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    if family == "gemma3":
        given, grids, sizes = torch.randn(4, 3, 28, 28), None, [4] * 4
        of = [{"pixel_values": given[[n]]} for n in range(4)]
    else:
        grids, sizes = GRIDS, (GRIDS.prod(-1) // 4).tolist()
        rows = torch.randn(int(GRIDS.prod(-1).sum()), 3 * 2 * 14 * 14).split(GRIDS.prod(-1).tolist())
        of = [{"pixel_values": rows[n], "image_grid_thw": GRIDS[[n]]} for n in range(4)]

    def pixels(numbers: Sequence[int]) -> dict[str, Tensor]:
        return {name: torch.cat([of[n][name] for n in numbers]) for name in of[0]}

    give_images(model, Images(np.cumsum([0, *sizes]), grids, pixels, frozen))
    return model


def plain_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """Logits of one sequence by transformers alone: the processor's inputs to the model's own pass. (L, V)"""
    images, numbers = model.images, list[int]()
    for token in ids:
        if token < 0 and -1 - token in images.starts:
            numbers.append(int(np.searchsorted(images.starts, -1 - token, side="right")) - 1)
    row = torch.tensor([ids])
    kinds = (row < 0).int()
    given: dict[str, Any] = {"input_ids": torch.where(row < 0, IMAGE, row)} | (
        images.pixels(numbers) if numbers else {}
    )
    if numbers:
        given["mm_token_type_ids" if images.grids is not None else "token_type_ids"] = kinds
    model.model.rope_deltas = None  # which transformers keeps from an earlier pass
    return model(**given, use_cache=False).logits[0].float()
