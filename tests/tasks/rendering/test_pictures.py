"""Thumbnails are small, keep their aspect and what is drawn; a page has no more of them than fit."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image, ImageDraw

from tasks.rendering import pictures as module
from tasks.rendering.pictures import LONGEST, MOST, SIDES, Pictures, thumbnail
from tests.vision import picture


def _opened(address: str) -> Image.Image:
    kind, _, content = address.partition(";base64,")
    found = Image.open(io.BytesIO(base64.b64decode(content, validate=True)))
    assert kind == f"data:image/{found.format.lower()}"  # type: ignore[union-attr]
    return found


def _drawn(width: int, height: int) -> Image.Image:
    image = Image.new("RGB", (width, height), "white")
    ImageDraw.Draw(image).ellipse((0, 0, width // 2, height // 2), fill="red")
    return image


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (30, 20), (320, 320), (321, 100), (4000, 3000), (5000, 1)])
@pytest.mark.parametrize("make", [_drawn, picture], ids=["drawn", "noise"])
def test_a_thumbnail_is_short_and_keeps_its_aspect(make: object, size: tuple[int, int]) -> None:
    image = make(*size)  # type: ignore[operator]
    address = thumbnail(image)
    assert len(address) <= 20_000
    small = _opened(address)
    assert max(small.size) <= min(320, max(size))
    scale = max(small.size) / max(size)
    assert all(abs(it - max(1, scale * whole)) <= 1 for it, whole in zip(small.size, size, strict=True))
    assert image.size == size, "the image itself is left as it is"


def test_a_drawing_is_not_blurred() -> None:
    image = _drawn(200, 100)
    assert np.array_equal(np.asarray(_opened(thumbnail(image)).convert("RGB")), np.asarray(image))


def test_a_photograph_loses_quality_before_it_loses_pixels() -> None:
    smooth = Image.effect_noise((900, 600), 30).resize((3000, 2000)).convert("RGB")
    small = _opened(thumbnail(smooth))
    assert (small.format, small.size) == ("JPEG", (320, 213))


def test_each_image_of_a_page_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read, made = list[int](), list[object]()
    monkeypatch.setattr(module, "thumbnail", lambda image: made.append(image) or "data:,")

    def reading(number: int) -> Image.Image:
        read.append(number)
        return picture(number, 10)

    pictures = Pictures(reading)
    assert [it.words for it in pictures.of([3, 7, 3])] == [
        "image 3, 3 × 10 pixels",
        "image 7, 7 × 10 pixels",
        "image 3, 3 × 10 pixels",
    ]
    assert read == [3, 7] and len(made) == 2


def test_a_page_over_its_budget_names_the_images_that_it_does_not_show() -> None:
    noise = picture(*SIDES[1:], seed=1)
    whole = len(thumbnail(noise))
    pictures = Pictures(lambda _: noise)
    found = [*pictures.of(range(3)), *pictures.of([0] * 1000)]
    shown = [it for it in found if it.address]
    assert MOST - LONGEST - whole < sum(len(it.address) for it in shown) <= MOST < 5_000_000 - 900_000
    assert found[: len(shown)] == shown, "those before the end of the budget"
    assert {(it.words, it.address) for it in found[len(shown) :]} == {("[image 0, not shown]", "")}
    assert next(iter(Pictures(None).of([5]))).words == "[image 5, not shown]"
