"""Runs on prompts with images, as the stages validate and plan leave them."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_core import run_files
from grpo_core.config.files import dump_config, parse_config
from grpo_core.config.inputs import ModelConfig
from grpo_core.data.images import FILE, MARK, layout
from grpo_core.data.processor import load_processor
from grpo_core.planning.plan import make_plan, plan_inputs
from tests.conftest import config_values
from tests.vision import make_vision_base, picture, png

PICTURES = [picture(20 + 9 * (n % 4), 12 + 8 * (n % 3), seed=n) for n in range(7)]


def seeing_run(folder: Path, family: str, **keys: Any) -> Path:
    """A run of a small model of the family: 24 prompts, and 6 held out, of none, one or two of PICTURES each."""
    base, run = make_vision_base(folder / "base", family, weights=True), folder / "run"
    (run / "dataset").mkdir(parents=True)
    processor = load_processor(ModelConfig(name_or_path=str(base)))
    images = []
    for it in PICTURES:
        found = layout(processor, it.height, it.width)
        sizes = {"height": it.height, "width": it.width, "tokens": found.tokens, "grid": found.grid}
        images.append({"image": png(it), **sizes})
    pq.write_table(pa.Table.from_pylist(images, FILE), run / "dataset" / run_files.IMAGES, row_group_size=3)
    draw = random.Random(0)
    for name, count in (("train", 24), ("eval", 6)):
        rows = []
        for n in range(count):
            numbers = draw.sample(range(len(PICTURES)), draw.choice([0, 1, 1, 2]))
            said = f"{'a' * draw.randint(0, 3)}".join([MARK] * len(numbers)) + f"{name} {n}?"
            rows.append({"prompt": [{"role": "user", "content": said}], "images": numbers, "answer": str(n)})
        pq.write_table(pa.Table.from_pylist(rows), run / "dataset" / f"{name}.parquet")
    values = config_values(base, run / "dataset", **keys)
    values["rewards"] = [{"function": "length", "args": {"target": 4}}]
    config = parse_config(values)
    (run / run_files.CONFIG).write_text(dump_config(config))
    (run / run_files.PLAN).write_text(json.dumps({"plan": asdict(make_plan(plan_inputs(config, 24)))}))
    return run
