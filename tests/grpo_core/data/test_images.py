"""Images of prompts: opened as they are seen, refused before they do harm, shown to a model as its processor does."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageOps

from grpo_core.config.inputs import ModelConfig
from grpo_core.data.images import (
    FILE,
    MARK,
    ImageError,
    ImageFiles,
    PromptImages,
    layout,
    load_images,
    open_image,
    parts,
    render,
    show_images,
    size_of,
    text_of,
)
from grpo_core.data.processor import load_processor
from grpo_core.errors import ConfigError
from grpo_core.model.images import image_ids
from tests.conftest import make_model
from tests.vision import FAMILIES, make_vision_base, picture, png

SIDES = st.integers(3, 90)
SIZE = st.tuples(SIDES, SIDES)  # height, width
TEXTS = st.text(st.sampled_from("ab \n\té你<>"), max_size=6)
MESSAGE = st.lists(st.one_of(TEXTS, SIZE), min_size=1, max_size=5)


@pytest.fixture(scope="module", params=FAMILIES)
def processor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_vision_base(tmp_path_factory.mktemp(request.param), request.param)
    return load_processor(ModelConfig(name_or_path=str(folder)))


def _write(path: Path, processor: Any, files: list[bytes], group: int = 2) -> Path:
    """An images.parquet with these files."""
    rows = []
    for data in files:
        width, height = open_image(data).size
        laid_out = layout(processor, height, width)
        rows.append({"image": data, "height": height, "width": width, "tokens": laid_out.tokens, "grid": laid_out.grid})
    pq.write_table(pa.Table.from_pylist(rows, FILE), path, row_group_size=group)
    return path


def _shown(path: Path, processor: Any, files: list[bytes]) -> PromptImages:
    _write(path, processor, files)
    return show_images(path, processor, load_images(path, processor, frozen=True))


@example(first=[(28, 28), (28, 28)], answer=["a"], second=["\n\n", (90, 3), "\n", (56, 84), " "])
@given(first=MESSAGE, answer=st.lists(TEXTS, min_size=1, max_size=2), second=MESSAGE)
def test_a_prompt_has_the_ids_of_the_family_s_processor(
    processor: Any, tmp_path_factory: pytest.TempPathFactory, first: list[Any], answer: list[Any], second: list[Any]
) -> None:
    conversation, given, files = [], [], []
    for role, said in (("user", first), ("assistant", answer), ("user", second)):
        content: list[dict[str, Any]] = []
        text = ""
        for part in said:
            if isinstance(part, str):
                content += [{"type": "text", "text": part}] if part else []
                text += part
            else:
                image = picture(part[1], part[0], len(files))
                files.append(png(image))
                content.append({"type": "image", "image": image})
                text += MARK
        if all(not isinstance(it, str) or not it for it in said) and not content:
            content = [{"type": "text", "text": ""}]
        merged: list[dict[str, Any]] = []  # what is one text in ours is one part in theirs
        for part in content:
            if merged and part["type"] == "text" == merged[-1]["type"]:
                merged[-1] = {"type": "text", "text": merged[-1]["text"] + part["text"]}
            else:
                merged.append(part)
        given.append({"role": role, "content": merged})
        conversation.append({"role": role, "content": text})
    expected = processor.apply_chat_template(given, tokenize=True, add_generation_prompt=True, return_dict=True)
    shown = _shown(tmp_path_factory.mktemp("images") / "images.parquet", processor, files)
    ids = shown.encode(conversation, range(len(files)))
    (placeholder,) = processor.image_token_ids
    assert [placeholder if it < 0 else it for it in ids] == [*expected["input_ids"][0]]
    assert [it for it in ids if it < 0] == [*range(-1, -1 - shown.images.starts[-1], -1)]
    if shown.images.grids is not None and files:
        assert shown.images.grids.tolist() == expected["image_grid_thw"].tolist()


def test_numbers_say_which_images_a_prompt_has(processor: Any, tmp_path: Path) -> None:
    shown = _shown(tmp_path / "images.parquet", processor, [png(picture(seed=seed)) for seed in range(3)])
    ids = shown.encode([{"role": "user", "content": f"{MARK}{MARK}"}], [2, 0])
    assert [it for it in ids if it < 0] == image_ids(shown.images, 2) + image_ids(shown.images, 0)
    assert shown.encode([{"role": "user", "content": "a"}], []) == processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], add_generation_prompt=True, return_dict=False
    )


@example(size=(4, 799))
@given(size=SIZE)
def test_tokens_and_grids_follow_from_the_size_alone(processor: Any, size: tuple[int, int]) -> None:
    height, width = size
    found = layout(processor, height, width)
    own = processor(images=[[picture(width, height)]], text=[processor.image_token], return_tensors="pt")
    assert found.tokens == sum(it in processor.image_token_ids for it in own["input_ids"][0].tolist())
    assert found.grid == (own["image_grid_thw"][0].tolist() if "image_grid_thw" in own else None)
    counted = processor._get_num_multimodal_tokens(image_sizes=[size])
    assert found.tokens == counted["num_image_tokens"][0]


@pytest.mark.parametrize("processor", ["qwen2_5_vl"], indirect=True)
def test_an_image_that_the_processor_refuses_is_refused_by_its_size(processor: Any) -> None:
    with pytest.raises(ImageError, match=r"801 × 4 pixels, which the model's processor refuses: .*aspect ratio"):
        layout(processor, 4, 801)


def test_a_placeholder_in_a_text_is_no_image(processor: Any, tmp_path: Path) -> None:
    shown = _shown(tmp_path / "images.parquet", processor, [png(picture())])
    for text in (f"{MARK}{processor.image_token}", processor.image_token):
        with pytest.raises(ConfigError, match="has places for another number of them: the chat template leaves"):
            shown.encode([{"role": "user", "content": text}], [0] if MARK in text else [0, 0])


def test_the_pixels_are_those_of_the_family_s_processor(processor: Any, tmp_path: Path) -> None:
    pictures = [picture(10 + 7 * seed, 40, seed) for seed in range(5)]
    path = _write(tmp_path / "images.parquet", processor, [png(it) for it in pictures])
    read = load_images(path, processor, frozen=True)
    order = [3, 0, 3, 4]
    expected = processor.image_processor([pictures[it] for it in order], return_tensors="pt")
    found = read.pixels(order)
    assert {*found} == {*expected} - {*processor.unused_input_names}
    for name, values in found.items():
        assert values.equal(expected[name]), name
    assert ImageFiles(path).read([4, 1]) == [png(pictures[4]), png(pictures[1])]


def test_a_text_has_the_parts_that_it_was_made_of() -> None:
    assert parts(f"a{MARK}{MARK}b") == [
        {"type": "text", "text": "a"},
        {"type": "image"},
        {"type": "image"},
        {"type": "text", "text": "b"},
    ]
    assert parts("") == [{"type": "text", "text": ""}]


@given(text=st.text(st.sampled_from(f"ab{MARK}"), max_size=10))
def test_parts_can_be_made_a_text_again(text: str) -> None:
    assert text_of(parts(text)) == text


def _corner() -> Image.Image:
    """Black, with one white corner and one grey side."""
    image = Image.new("RGB", (48, 32))
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, 15, 15), fill="white")
    draw.rectangle((40, 0, 47, 31), fill="gray")
    return image


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_an_image_is_turned_as_it_is_seen(orientation: int, form: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = png(_corner(), form, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert open_image(data).size == expected.size == size_of(data)[::-1]
    assert np.array_equal(np.asarray(open_image(data)), np.asarray(expected))


def test_damaged_exif_data_turn_nothing() -> None:
    data = png(_corner(), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\0\0")
    assert open_image(data).size == (48, 32)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr"])
def test_images_of_other_modes_are_in_rgb(mode: str) -> None:
    form = "TIFF" if mode in ("CMYK", "YCbCr") else "PNG"
    image = picture(mode=mode)
    opened = open_image(png(image, form))
    assert opened.mode == "RGB"
    assert np.array_equal(np.asarray(opened), np.asarray(Image.open(io.BytesIO(png(image, form))).convert("RGB")))


def test_sixteen_bits_become_eight_in_proportion() -> None:
    values = np.array([[0, 255, 256, 32768, 65535]], np.uint16)
    opened = open_image(png(Image.fromarray(values)))
    assert np.asarray(opened)[0, :, 0].tolist() == [0, 0, 1, 128, 255]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_becomes_white(mode: str) -> None:
    half = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    half.putpixel((1, 0), (255, 0, 0, 255))
    opened = open_image(png(half.convert(mode)))
    assert opened.getpixel((0, 0)) == (255, 255, 255)
    assert opened.getpixel((1, 0)) == ((76,) * 3 if mode == "LA" else (255, 0, 0))
    assert open_image(png(Image.new("RGBA", (1, 1), (0, 0, 0, 128)))).getpixel((0, 0)) == (127, 127, 127)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _bomb(side: int) -> bytes:
    """A PNG whose header says so many pixels, and that has none."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", b"") + _chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [5_000, 60_000])
def test_a_decompression_bomb_is_refused_by_its_header(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda _: pytest.fail("it is decoded"))
    with pytest.raises(ImageError, match=r"pixels, and data.max_image_pixels = 16777216|DecompressionBomb"):
        open_image(_bomb(side), 2**24)


def _animation(form: str) -> bytes:
    frames = [picture(seed=seed) for seed in range(3)]
    return png(frames[0], form, save_all=True, append_images=frames[1:])


REFUSED = {
    "moves": (_animation("GIF"), "more than one image in a file"),
    "moves, as WebP": (_animation("WEBP"), "more than one image in a file"),
    "moves, as PNG": (_animation("PNG"), "more than one image in a file"),
    "has pages": (_animation("TIFF"), "more than one image in a file"),
    "truncated": (png(picture(90, 90))[:9000], "damaged: OSError"),
    "truncated JPEG": (png(picture(90, 90), "JPEG")[:2000], "damaged: OSError"),
    "no image": (b"GIF is what this text begins with", "not an image in PNG, JPEG"),
    "empty": (b"", "not an image in PNG, JPEG"),
    "a program": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image in PNG, JPEG"),
    "a header alone": (_bomb(10), "damaged"),
    "numbers": (png(Image.fromarray(np.ones((2, 2), np.float32)), "TIFF"), "pixels of mode 'F'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_whole_still_image_is_refused(name: str) -> None:
    data, said = REFUSED[name]
    with pytest.raises(ImageError, match=said):
        open_image(data)


def test_a_photograph_with_its_preview_is_one_image() -> None:
    first, preview = picture(seed=1), picture(8, 8)
    data = png(first, "MPO", save_all=True, append_images=[preview], quality=95)
    assert Image.open(io.BytesIO(data)).n_frames == 2
    assert open_image(data).size == first.size
    one = png(picture(), "GIF")
    assert open_image(one).size == picture().size


@given(
    cut=st.integers(0, 4000), changed=st.integers(0, 255), form=st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "TIFF"])
)
def test_a_damaged_file_is_an_image_or_refused(cut: int, changed: int, form: str) -> None:
    data = bytearray(png(picture(20, 20), form))
    data[cut % len(data)] = changed
    for damaged in (bytes(data), bytes(data[: cut % len(data)])):
        try:
            assert open_image(damaged, 2**20).mode == "RGB"
        except ImageError as error:
            assert str(error)


def test_a_model_is_refused_that_reads_no_images_or_has_no_template(tmp_path: Path) -> None:
    text = make_model(tmp_path / "text")
    with pytest.raises(
        ConfigError, match="the data have images, and a qwen2 reads text alone; name a model that reads"
    ):
        load_processor(ModelConfig(name_or_path=str(text)))
    bare = make_vision_base(tmp_path / "bare", "qwen2_5_vl")
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template, which images need"):
        load_processor(ModelConfig(name_or_path=str(bare)))
    (bare / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match="its processor, which images are read by, cannot be loaded"):
        load_processor(ModelConfig(name_or_path=str(bare)))


def test_a_processor_is_read_as_transformers_saves_it(processor: Any, tmp_path: Path) -> None:
    family = {"Gemma3Processor": "gemma3", "Qwen2_5_VLProcessor": "qwen2_5_vl"}[type(processor).__name__]
    folder = make_vision_base(tmp_path, family)
    (folder / "preprocessor_config.json").unlink()
    processor.save_pretrained(folder)
    again = load_processor(ModelConfig(name_or_path=str(folder)))
    assert type(again.image_processor).__name__.endswith("Pil")
    assert again.image_processor.to_dict() == processor.image_processor.to_dict()
    message = [{"role": "user", "content": MARK}]
    assert render(again, message) == render(processor, message)
    assert layout(again, 40, 60) == layout(processor, 40, 60)
