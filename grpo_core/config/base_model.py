"""What the config.json of a base model says that rules a training out. Imports no library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def quantisation_problem(values: Mapping[str, Any]) -> str:
    """Problem of a base whose saved weights are quantised, by the values of its config.json; "" if they are not.

    No training here dequantises any: weights without their scales, or kernels without a gradient, would train a model
    that no one has.
    """
    for part in (values, values.get("text_config") or {}):
        if found := part.get("quantization_config") or part.get("compression_config"):
            return (
                f"its weights are quantised (quant_method = {found.get('quant_method')!r}), and no training here is "
                "made for that; name the checkpoint that it was made from, or a dequantised copy (transformers loads "
                "fp8 and mxfp4 with `dequantize=True`, and save_pretrained writes it). model.load_in_4bit quantises a "
                "base itself"
            )
    return ""
