"""Images in sequences: each token of an image has an id of its own, below 0, so that prompts with images are known by
their ids as all others are. Only where a model reads ids are these turned into what it knows.

The ids -1, -2, … count the tokens of all images of a run, one image after the other. A pass is given the embedding of
any token in their place, whose output then becomes the image's features: what the model's image part, a vision tower
and a projection, makes of the pixels.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from grpo_core.system.to_device import move, to_device

KEPT = 2**30  # bytes of features that are kept on the device
PLACEHOLDER = 0  # the token that a model reads in the place of an image's: its embedding is replaced


@dataclass(frozen=True, eq=False)
class Images:
    """The images of a run. A model reads them if it has them as its attribute `images`."""

    starts: np.ndarray  # (n + 1,) int64, tokens of the images before each, and of all
    grids: Int64[Tensor, "n 3"] | None  # frames, height and width in patches, for a family that counts positions by it
    pixels: Callable[[Sequence[int]], dict[str, Tensor]]  # the processor's tensors of the images with these numbers
    frozen: bool = True  # the image part is not trained
    kept: OrderedDict[tuple[int, torch.dtype, int], Tensor] = field(default_factory=OrderedDict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Images:  # with a model
        return Images(self.starts, self.grids, self.pixels, self.frozen)

    def numbers(self, virtual: np.ndarray) -> np.ndarray:
        """Number of the image of each of these ids below 0."""
        return np.searchsorted(self.starts, -1 - virtual, side="right") - 1


@dataclass(frozen=True)
class Shown:
    """The images among the B · L tokens of a pass, M of which are of images."""

    numbers: tuple[int, ...]  # each once
    places: Int64[Tensor, " M"]  # among the tokens of the pass
    rows: Int64[Tensor, " M"]  # among the features of these images, one image after the other
    kinds: Int64[Tensor, "B L"]  # 1 for a token of an image
    positions: Int64[Tensor, "3 B L"] | None  # in time, height and width, of a model that counts them by images


def image_ids(images: Images, number: int) -> list[int]:
    """The ids of an image's tokens."""
    return [-1 - place for place in range(images.starts[number], images.starts[number + 1])]


def images_of(model: Any) -> Images | None:
    """The images that a model reads; None if it reads text alone."""
    return getattr(_base(model), "images", None)


def look(
    model: Any, ids: Int64[Tensor, "B L"], mask: Tensor | None = None, *, packed: bool = False
) -> tuple[Tensor, Shown | None]:
    """Return the ids that the model reads, and the images among them; None if there is none. On the CPU. `mask`: 0 for
    padding; `packed`: the ids are not in rows, so that positions have to be given otherwise."""
    images = images_of(model)
    if images is None or not bool((of_image := ids < 0).any()):
        return ids, None
    virtual = ids[of_image].numpy()
    owners = images.numbers(virtual)
    numbers, place = np.unique(owners, return_inverse=True)
    sizes = images.starts[numbers + 1] - images.starts[numbers]
    rows = (np.cumsum(sizes) - sizes)[place] - 1 - virtual - images.starts[owners]
    places = of_image.flatten().nonzero().squeeze(1)
    placed = None if packed else positions(model, ids, mask)
    shown = Shown(tuple(numbers.tolist()), places, torch.from_numpy(rows), of_image.long(), placed)
    return ids.masked_fill(of_image, PLACEHOLDER), shown


def on_device(model: Any, ids: Int64[Tensor, "B L"], mask: Tensor | None = None) -> tuple[Tensor, Shown | None]:
    """Do as `look`; the results are where the model is."""
    (ids, shown), device = look(model, ids, mask), next(model.parameters()).device
    return ids.to(device), shown and to_device(shown, device)


def positions(model: Any, ids: Int64[Tensor, "B L"], mask: Tensor | None = None) -> Int64[Tensor, "3 B L"] | None:
    """Positions in time, height and width of each token (M-RoPE, arXiv:2409.12191), by the model's own rule; None if it
    counts tokens, or there is no image. `mask`: 0 for padding. On the CPU."""
    images = images_of(model)
    if images is None or images.grids is None or not bool((of_image := ids < 0).any()):
        return None
    virtual = ids[of_image].numpy()
    owners = images.numbers(virtual)
    begins = -1 - virtual == images.starts[owners]
    grids = images.grids[torch.from_numpy(owners[begins])]
    found, _ = whole(model).get_rope_index(ids, of_image.int(), image_grid_thw=grids, attention_mask=mask)
    return found


def keys(model: Any, shown: Shown | None) -> dict[str, Tensor]:
    """What a model's own pass is told of the images among its tokens: positions, and where Gemma 3 lets an image's
    tokens attend to each other."""
    if shown is None:
        return {}
    found = {"position_ids": shown.positions, "token_type_ids": shown.kinds}
    taken = signature(whole(model).forward).parameters
    return {name: tensor for name, tensor in found.items() if tensor is not None and name in taken}


def whole(model: Any) -> Any:
    """The module that gives the last hidden states with masks for images: around the decoder."""
    return _base(model).model


@contextmanager
def showing(model: Any, shown: Shown | None) -> Iterator[None]:
    """Inside, a pass over tokens in which `shown` was found reads these images."""
    if shown is None:
        yield
        return
    features = _features(_base(model), shown.numbers)

    def replace(_module: Any, _inputs: Any, embedded: Tensor) -> Tensor:
        flat = embedded.flatten(0, -2)
        return flat.index_copy(0, shown.places, features.to(flat.dtype)[shown.rows]).view(embedded.shape)

    hook = model.get_input_embeddings().register_forward_hook(replace)
    try:
        yield
    finally:
        hook.remove()


def _features(model: Any, numbers: Sequence[int]) -> Tensor:
    """Features of the images, one image after the other. (F, h)

    Those of an image part that is not trained are kept, and computed for each image alone: in a pass with others, they
    would depend on these by rounding, and a resumed training on what had been kept.
    """
    images: Images = model.images
    if not images.frozen:
        return _encode(model, numbers)
    kept, embedding = images.kept, model.get_input_embeddings().weight
    names = [(number, embedding.dtype, embedding.device.index or 0) for number in numbers]
    found = []
    for name in names:
        if name not in kept:
            with torch.no_grad():
                kept[name] = _encode(model, [name[0]])
        kept.move_to_end(name)
        found.append(kept[name])
    size = sum(each.nbytes for each in kept.values())
    while size > KEPT and len(kept) > len(names):
        size -= kept.popitem(last=False)[1].nbytes
    return torch.cat(found)


def _encode(model: Any, numbers: Sequence[int]) -> Tensor:
    part = next(each for name, each in model.model.named_parameters() if "language_model" not in name)
    given = model.images.pixels(numbers)
    tensors = dict(zip(given, move([*given.values()], part.device), strict=True))
    tensors = {name: it.to(part.dtype) if it.is_floating_point() else it for name, it in tensors.items()}
    return torch.cat([*model.model.get_image_features(**tensors, return_dict=True).pooler_output])


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model
