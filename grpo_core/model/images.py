"""Images as a model reads them: each token of an image is a virtual id below zero, counted over all images of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Images:
    """All images of a run."""

    starts: np.ndarray  # (n + 1,) int64, tokens before each image
    grids: Tensor | None  # (n, 3)
    pixels: Callable[[Sequence[int]], dict[str, Tensor]]  # the processor's tensors of the images with these numbers
    frozen: bool  # the image part is not trained: its features may be kept


def image_ids(images: Images, number: int) -> list[int]:
    """The virtual ids of an image, one per token."""
    start, end = map(int, images.starts[number : number + 2])
    return [*range(-1 - start, -1 - end, -1)]
