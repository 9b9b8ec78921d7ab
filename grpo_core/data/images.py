"""Images of prompts: opened, and shown to a model as a run of token ids.

In a message's text, an image is one character, MARK; the row's column `images` has the numbers of its images, in the
order of their marks. All images of a run are in one file, dataset/images.parquet, each once.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_core import run_files
from grpo_core.config.inputs import MOST_PIXELS
from grpo_core.data.chat import NO_OPTIONS, without_gaps
from grpo_core.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

    from grpo_core.model.images import Images

MARK = "\ufffc"  # Unicode's object replacement character
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # of others, Pillow starts programs to read some
UPRIGHT = 4  # the last EXIF orientation in which height and width stay
READ = 64  # images that are read together
SIZES = 2**16  # sizes of images whose tokens are kept in memory
FILE = pa.schema(
    {
        "image": pa.binary(),
        "height": pa.int32(),
        "width": pa.int32(),
        "tokens": pa.int32(),
        "grid": pa.list_(pa.int32()),
    }
)


class ImageError(ValueError):
    """Raised for an image that cannot be used; the message says why."""


def open_image(data: bytes, max_pixels: int = MOST_PIXELS) -> Image:
    """Open an image file's bytes, in RGB and turned as its EXIF data say. What is transparent becomes white, and 16
    bits become 8. Raises ImageError if it is no image, is damaged, moves or has more than `max_pixels`, which its
    header says before anything is decoded."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as file:
            width, height = file.size
            if width * height > max_pixels:
                raise ImageError(f"{width} × {height} pixels, and data.max_image_pixels = {max_pixels}")
            # Of photographs in this form of JPEG, the further images are previews and maps of brightness.
            if file.format != "MPO" and getattr(file, "is_animated", False):
                raise ImageError("more than one image in a file: an animation, or several pages")
            if file.mode == "F" or (file.mode.startswith("I") and not file.mode.startswith("I;16")):
                raise ImageError(f"pixels of mode {file.mode!r}, of which nobody knows which value is white")
            file.load()
            return _in_rgb(_turned(file))
    except ImageError:
        raise
    except UnidentifiedImageError:
        raise ImageError("not an image in PNG, JPEG, WebP, GIF, BMP or TIFF") from None
    except Exception as error:  # decoders of damaged files raise anything
        raise ImageError(f"damaged: {type(error).__name__}: {error}") from error


def size_of(data: bytes) -> tuple[int, int]:
    """Height and width of an image as `open_image` gives it, by its header alone. Raises ImageError if it has none."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as file:
            width, height = file.size
            turned = _orientation(file) > UPRIGHT and file.format != "TIFF"  # which Pillow turns itself
            return (width, height) if turned else (height, width)
    except Exception as error:
        raise ImageError(f"no header of an image: {error}") from error


def _orientation(image: Image) -> int:
    """The side that is up, by the EXIF data: 1 if they are damaged, or say nothing."""
    from PIL import ExifTags

    try:
        found = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # they need not be right for the image to be seen
        return 1
    return found if found in range(1, 9) else 1


def _turned(image: Image) -> Image:
    """The image as its EXIF data say that it is seen."""
    from PIL.Image import Transpose as To

    turns = [
        To.FLIP_LEFT_RIGHT,
        To.ROTATE_180,
        To.FLIP_TOP_BOTTOM,
        To.TRANSPOSE,
        To.ROTATE_270,
        To.TRANSVERSE,
        To.ROTATE_90,
    ]
    orientation = _orientation(image)
    return image if orientation == 1 else image.transpose(turns[orientation - 2])


def _in_rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode.startswith("I;16"):  # Pillow would cut off what is above 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def parts(text: str) -> list[dict[str, str]]:
    """A message's text as content parts, as chat templates and TRL have them: an image at each mark, and the text
    between."""
    found: list[dict[str, str]] = []
    for place, between in enumerate(text.split(MARK)):
        found += [{"type": "image"}] if place else []
        found += [{"type": "text", "text": between}] if between else []
    return found or [{"type": "text", "text": ""}]


def text_of(content: Sequence[Mapping[str, Any]]) -> str:
    """The text of content parts, with a mark for each image."""
    return "".join(part.get("text") or "" if part["type"] == "text" else MARK for part in content)


def in_words(prompt: Any, sizes: Iterable[Sequence[int]] = ()) -> Any:
    """The prompt for readers of text: in the place of each image, "[image: 51 × 30]", width × height. `sizes`: height
    and width of its images, in order; without them, "[image]"."""
    if isinstance(prompt, str):
        return prompt
    left = iter(sizes)
    return [{**it, "content": _in_words(it["content"], left)} if it.get("content") else it for it in prompt]


def _in_words(content: str | Sequence[Mapping[str, Any]], left: Iterator[Sequence[int]]) -> str:
    first, *others = (content if isinstance(content, str) else text_of(content)).split(MARK)
    sizes = [next(left, ()) for _ in others]
    words = (f"[image: {size[1]} × {size[0]}]" if size else "[image]" for size in sizes)
    return first + "".join(word + text for word, text in zip(words, others, strict=True))


@dataclass(frozen=True)
class Layout:
    """What stands for an image in a prompt."""

    text: str  # in the place of the chat template's own placeholder
    tokens: int  # of it, those that are the image's
    grid: list[int] | None  # the family's image_grid_thw


@lru_cache(SIZES)
def layout(processor: Any, height: int, width: int) -> Layout:
    """The layout of images of this size, by the processor's own code. Raises ImageError if it refuses the size."""
    try:
        given = _grid_of(processor.image_processor, height, width)
        if given is not None:
            text = processor.replace_image_token({"image_grid_thw": np.array([given])}, 0)
        else:
            text, given = _laid_out(processor, height, width)
    except ValueError as error:
        raise ImageError(f"{width} × {height} pixels, which the model's processor refuses: {error}") from error
    ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    return Layout(text, sum(it in processor.image_token_ids for it in ids), given)


def _grid_of(image_processor: Any, height: int, width: int) -> list[int] | None:
    """The patches of an image by Qwen's arithmetic, which takes no pixels; None for other families."""
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as qwen

    if not isinstance(image_processor, qwen.Qwen2VLImageProcessorPil) or not image_processor.do_resize:
        return None
    patch, size = image_processor.patch_size, image_processor.size
    factor = patch * image_processor.merge_size
    sides = qwen.smart_resize(height, width, factor, size["shortest_edge"], size["longest_edge"])
    return [1, *(side // patch for side in sides)]


def _laid_out(processor: Any, height: int, width: int) -> tuple[str, list[int] | None]:
    """Text and grid that the processor gives to a blank image."""
    from PIL import Image

    if type(processor).__name__ == "Gemma3Processor":  # lays out all alike, after resizing them to one size
        height = width = processor.image_processor.size["height"]
    blank = Image.new("RGB", (width, height))
    given = processor(images=[[blank]], text=[processor.image_token], return_text_replacement_offsets=True)
    grid = given.get("image_grid_thw")
    [[placed]] = given["text_replacement_offsets"]
    return placed["replacement"], None if grid is None else [int(it) for it in grid[0]]


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of a run as its prompts show them."""

    processor: Any
    sizes: np.ndarray  # (n, 2), height and width
    images: Images

    def encode(
        self, messages: Sequence[Mapping[str, Any]], numbers: Sequence[int], options: Mapping[str, Any] = NO_OPTIONS
    ) -> list[int]:
        """Token ids of a prompt with the images of these `numbers`: those of the processor, with the virtual ids of the
        images' tokens. `options`: variables of the chat template. Raises ConfigError if the template leaves an image
        out."""
        from grpo_core.model.images import image_ids

        processor, tokenizer = self.processor, self.processor.tokenizer
        text = render(processor, messages, options)
        layouts = [layout(processor, *map(int, self.sizes[number])) for number in numbers]
        is_whole = not numbers or text.count(processor.image_token) == len(numbers)
        if is_whole:
            (text,), _ = processor.get_text_with_replacements([text], [it.text for it in layouts])
        begins = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
        ids = tokenizer(text, add_special_tokens=not begins)["input_ids"]
        if not numbers:
            return ids
        own = {*processor.image_token_ids}
        virtual = [*chain.from_iterable(image_ids(self.images, number) for number in numbers)]
        if not is_whole or sum(it in own for it in ids) != len(virtual):
            raise ConfigError(
                f"a prompt with {len(numbers)} images has places for another number of them: the chat template leaves "
                f"some out, or a message says {processor.image_token!r}; the prompt: {str(in_words(messages))[:200]}"
            )
        following = iter(virtual)
        return [next(following) if it in own else it for it in ids]


def encode_row(shown: PromptImages, options: Mapping[str, Any], row: Mapping[str, Any]) -> list[int]:
    """Token ids of a validated row."""
    return shown.encode(row["prompt"], row["images"], options)


def render(processor: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] = NO_OPTIONS) -> str:
    """The chat template's text of messages, with the family's placeholder for each image."""
    given = [
        {**message, "content": parts(message["content"])} if isinstance(message.get("content"), str) else message
        for message in without_gaps(messages)
    ]
    whole = {"add_generation_prompt": True, "chat_template": processor.chat_template, **options}
    return processor.tokenizer.apply_chat_template(given, tokenize=False, **whole)


def load_images(path: Path, processor: Any, frozen: bool) -> Images:
    """The images in a file that the stage validate wrote."""
    import torch

    from grpo_core.model.images import Images

    table = pq.read_table(path, columns=["tokens", "grid"])
    starts = np.concatenate([[0], np.cumsum(table["tokens"].to_numpy(), dtype=np.int64)])
    grids = None if table["grid"].null_count else torch.tensor(table["grid"].to_pylist()).reshape(-1, 3)
    files, names = ImageFiles(path), processor.image_processor.model_input_names

    def pixels(numbers: Sequence[int]) -> dict[str, Any]:
        given = processor(images=[open_image(data) for data in files.read(numbers)], return_tensors="pt")
        return {name: given[name] for name in names if name in given}

    return Images(starts, grids, pixels, frozen)


def show_images(path: Path, processor: Any, images: Images) -> PromptImages:
    """The images as prompts show them. `path`: their file."""
    table = pq.read_table(path, columns=["height", "width"])
    return PromptImages(processor, np.column_stack([table["height"].to_numpy(), table["width"].to_numpy()]), images)


@dataclass(frozen=True)
class ImageFiles:
    """The images in a file that the stage validate wrote, as they were given."""

    path: Path

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        """The bytes of the images with these numbers. Reads the groups of rows that have them."""
        status = self.path.stat()
        facts = _facts(self.path, status.st_size, status.st_mtime_ns)
        ends = np.cumsum([facts.row_group(group).num_rows for group in range(facts.num_row_groups)])
        groups = np.searchsorted(ends, numbers, side="right")
        found: dict[int, bytes] = {}
        with pq.ParquetFile(self.path, metadata=facts) as file:
            for group in np.unique(groups):
                column = file.read_row_group(int(group), ["image"])["image"]
                first = int(ends[group]) - len(column)
                found |= {it: column[it - first].as_py() for it in map(int, np.asarray(numbers)[groups == group])}
        return [found[int(number)] for number in numbers]

    def digests(self, numbers: Sequence[int]) -> list[str]:
        """Hash of each of these images' bytes, a few of which are in memory at a time."""
        found: dict[int, str] = {}
        for first in range(0, len(numbers), READ):
            part = [number for number in dict.fromkeys(numbers[first : first + READ]) if number not in found]
            hashes = (blake2b(data, digest_size=16).hexdigest() for data in (self.read(part) if part else []))
            found |= dict(zip(part, hashes, strict=True))
        return [found[number] for number in numbers]

    def sizes(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Height and width of the images with these numbers."""
        heights, widths = (pq.read_table(self.path, columns=[name])[name] for name in ("height", "width"))
        return [(heights[number].as_py(), widths[number].as_py()) for number in map(int, numbers)]


@lru_cache
def _facts(path: Path, _size: int, _modified_ns: int) -> Any:
    return pq.read_metadata(path)


def beside(data: Path) -> ImageFiles | None:
    """The images of a validated data set; None if it has none."""
    path = data.with_name(run_files.IMAGES)
    return ImageFiles(path) if path.exists() else None


def with_pictures(messages: Sequence[Mapping[str, Any]], pictures: Sequence[Image]) -> list[dict[str, Any]]:
    """Messages as TRL's rewards see them: content parts, each image in its own."""
    left = iter(pictures)
    return [
        {**it, "content": [_filled(part, left) for part in parts(it["content"])]} if it.get("content") else {**it}
        for it in messages
    ]


def _filled(part: dict[str, Any], left: Iterator[Image]) -> dict[str, Any]:
    return part | {"image": next(left)} if part["type"] == "image" else part
