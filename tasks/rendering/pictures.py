"""Images on pages and in traces: made small, and written into their address, so that no server is asked for them."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

LONGEST = 20_000  # characters of a thumbnail's address
SIDES = (320, 160, 80)  # most pixels of a thumbnail's longer side; the next if no quality is short enough
QUALITIES = (85, 70, 50, 30)  # of JPEG, for what is too long as PNG
MOST = 4_000_000  # characters of all addresses of a page, which leaves 1 MB for the rest of it


def thumbnail(image: Image) -> str:
    """A data: address of the RGB image, with its aspect and never enlarged. Drawings stay exact; photographs lose
    quality until the address is at most LONGEST characters."""
    for side in SIDES:
        small = image.copy()
        small.thumbnail((side, side))
        for kind, quality in [("png", {}), *(("jpeg", {"quality": quality}) for quality in QUALITIES)]:
            file = io.BytesIO()
            small.save(file, kind, optimize=True, **quality)
            address = f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
            if len(address) <= LONGEST:
                return address
    raise AssertionError(f"{SIDES[-1]} × {SIDES[-1]} pixels of JPEG are shorter than {LONGEST} characters")


@dataclass(frozen=True)
class Picture:
    """An image in a text. `words`: what it is; `address`: of its thumbnail, "" if it is not shown."""

    words: str
    address: str = ""


@dataclass
class Pictures:
    """The images of one page, each made small once. `read`: gives the image with a number; None if they are not at
    hand. Addresses have at most `most` characters together: the images after that are not shown."""

    read: Callable[[int], Image] | None
    most: int = MOST
    made: dict[int, Picture] = field(default_factory=dict)

    def of(self, numbers: Sequence[int]) -> Iterator[Picture]:
        """Yield the images with these numbers."""
        for number in numbers:
            picture = self._made(number)
            self.most -= len(picture.address)
            yield picture

    def _made(self, number: int) -> Picture:
        hidden = Picture(f"[image {number}, not shown]")
        if self.read is None or self.most < LONGEST:
            return hidden
        if number not in self.made:
            image = self.read(number)
            self.made[number] = Picture(f"image {number}, {image.width} × {image.height} pixels", thumbnail(image))
        return self.made[number]
