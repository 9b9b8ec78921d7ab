"""Pictures of coloured shapes with a question about their number, and a vision-language base that counts in haste.

A picture is divided into cells, as large as the patches in which the model sees it; a shape lies within one, anywhere.
No held-out picture is a training one.
"""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples import tiny

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

TRAIN_ROWS, EVAL_ROWS = 4000, 300
STEPS, CONTEXT = 600, 64
CELL, CELLS = 14, 4  # pixels of a cell, cells of a side
MOST, MOST_OTHERS = 5, 4  # shapes of the colour that is asked for, at least one; and of the other colours
HASTE, FEW = 0.7, 2  # share of the demonstrated counts above FEW that are too low by one
COLOURS = {"red": (220, 40, 40), "green": (30, 160, 60), "blue": (50, 80, 220)}
KINDS = ("circle", "square", "triangle")
GREY = (128, 128, 128)  # the background, which the model sees as 0
IMAGE, START, END, VIDEO = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"  # as Qwen2.5-VL's
IMAGE_TOKENS = (CELLS // 2) ** 2  # the model joins two by two patches
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Shape = tuple[str, str]  # kind and colour


def make_rows(seed: int = tiny.SEED) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out rows; no two pictures are alike."""
    rng = random.Random(seed)
    rows: dict[bytes, dict[str, Any]] = {}
    while len(rows) < TRAIN_ROWS + EVAL_ROWS:
        colour, count = rng.choice([*COLOURS]), rng.randint(1, MOST)
        others = [it for it in COLOURS if it != colour]
        colours = [colour] * count + [rng.choice(others) for _ in range(rng.randint(0, MOST_OTHERS))]
        image = png(draw([(rng.choice(KINDS), it) for it in colours], rng))
        rows[image] = make_row(image, colour, count)
    return [*rows.values()][EVAL_ROWS:], [*rows.values()][:EVAL_ROWS]


def make_row(image: bytes, colour: str, count: int) -> dict[str, Any]:
    question = f"How many {colour} shapes are there?"
    return {"prompt": [{"role": "user", "content": question}], "image": image, "answer": str(count)}


def draw(shapes: list[Shape], rng: random.Random) -> Image:
    """Draw each shape within a cell of its own; no two touch."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (CELLS * CELL, CELLS * CELL), GREY)
    pencil = ImageDraw.Draw(picture)
    for (kind, colour), cell in zip(shapes, rng.sample(range(CELLS**2), len(shapes)), strict=True):
        radius = rng.randint(4, 5)
        x, y = (place * CELL + rng.randint(radius, CELL - 2 - radius) for place in divmod(cell, CELLS))
        left, top, right, bottom = x - radius, y - radius, x + radius, y + radius
        if kind == "circle":
            pencil.ellipse((left, top, right, bottom), COLOURS[colour])
        elif kind == "square":
            pencil.rectangle((left + 1, top + 1, right - 1, bottom - 1), COLOURS[colour])
        else:
            pencil.polygon([(x, top), (left, bottom), (right, bottom)], COLOURS[colour])
    return picture


def png(picture: Image) -> bytes:
    written = io.BytesIO()
    picture.save(written, "PNG")
    return written.getvalue()


def demonstrate(row: dict[str, Any], rng: random.Random) -> tiny.Demonstration:
    """Count in haste: of several shapes, one is often left out. The picture is written as the model reads it."""
    count = int(row["answer"])
    seen = START + IMAGE * IMAGE_TOKENS + END + row["prompt"][0]["content"]
    return [{"role": "user", "content": seen}], str(count - (count > FEW and rng.random() < HASTE))


def make_tokenizer(rows: list[dict[str, Any]]) -> Qwen2Tokenizer:
    learnt = tiny.make_tokenizer([(row["prompt"], row["answer"]) for row in rows], template=CHAT_TEMPLATE)
    learnt.add_tokens([START, END, IMAGE, VIDEO], special_tokens=True)
    return learnt


def make_model(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """Make a random Qwen2.5-VL of some 0.5 million parameters, with its patches of 14 pixels."""
    from transformers import GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vocabulary = tokenizer.get_vocab()
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    width, vision_width, layers, spread = 96, 64, 2, 0.05  # the usual spread, 0.02, is for wider layers
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]},
            "initializer_range": spread,
            **ids,
        },
        vision_config={
            "depth": layers,
            "hidden_size": vision_width,
            "intermediate_size": 2 * vision_width,
            "num_heads": 4,
            "out_hidden_size": width,
            "fullatt_block_indexes": [*range(layers)],
            "initializer_range": spread,
        },
        image_token_id=vocabulary[IMAGE],
        video_token_id=vocabulary[VIDEO],
        vision_start_token_id=vocabulary[START],
        vision_end_token_id=vocabulary[END],
        dtype="float32",
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(do_sample=False, **ids)
    return model


def make_base(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Teach a new model the rows' demonstrations, and save it with its tokenizer and image processor."""
    import torch
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    torch.set_num_threads(1)
    torch.manual_seed(tiny.SEED)
    rng = random.Random(tiny.SEED)
    tokenizer = make_tokenizer(rows)
    model = make_model(tokenizer)
    inputs, labels = tiny.encode([demonstrate(row, rng) for row in rows], tokenizer)
    processor = Qwen2VLImageProcessorPil(image_mean=[0.5] * 3, image_std=[0.5] * 3)

    def seen(batch: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        pictures = [Image.open(io.BytesIO(rows[row]["image"])).convert("RGB") for row in batch.tolist()]
        is_image = (ids == model.config.image_token_id).int()
        return {**processor(pictures, return_tensors="pt"), "mm_token_type_ids": is_image}

    tiny.teach(model, inputs, labels, STEPS, tokenizer, seen)
    for part in (model, tokenizer, processor):
        part.save_pretrained(folder)


def make(folder: Path) -> None:
    train, held = make_rows()
    tiny.write_rows(folder, train, held)
    make_base(folder / "base", train)


if __name__ == "__main__":
    tiny.run(__file__, make)
