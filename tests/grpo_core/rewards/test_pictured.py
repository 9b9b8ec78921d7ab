"""What rewards are given of prompts with images, held against what TRL makes of the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from trl.data_utils import prepare_multimodal_messages

from grpo_core.config.inputs import RewardConfig
from grpo_core.data.images import FILE, MARK, ImageFiles
from grpo_core.rewards.batch import Batch
from grpo_core.rewards.contract import resolve
from grpo_core.rewards.scoring import score
from tests.vision import picture, png

SEEN: list[dict[str, Any]] = []


def looks(prompts: list[Any], images: list[Any], image: list[Any], completions: list[Any]) -> list[float]:
    SEEN.append({"prompts": prompts, "images": images, "image": image})
    return [float(len(own)) for own in images]


def takes_all(completions: list[Any], **columns: Any) -> list[float]:
    return [own[0].width if own else 0.0 for own in columns["images"]]


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    """Three rows: of no image, of one in two rows, and of two."""
    pictures = [picture(20 + n, 10, seed=n) for n in range(3)]
    rows = [
        {"image": png(it), "height": 10, "width": 20 + n, "tokens": 1, "grid": None} for n, it in enumerate(pictures)
    ]
    pq.write_table(pa.Table.from_pylist(rows, FILE), tmp_path / "images.parquet", row_group_size=2)

    def asked(text: str, *numbers: int) -> dict[str, Any]:
        return {"prompt": [{"role": "user", "content": MARK * len(numbers) + text}], "images": [*numbers]}

    data = [asked("none"), asked("one", 2), asked("two", 0, 2), asked("one", 2)]
    said = [[{"role": "assistant", "content": "yes"}]] * 4
    return Batch(data, said, [[1]] * 4, images=ImageFiles(tmp_path / "images.parquet"))


@pytest.mark.parametrize("isolated", [False, True])
def test_a_reward_gets_images_as_trl_gives_them(batch: Batch, isolated: bool) -> None:
    SEEN.clear()
    rewards = [
        resolve(RewardConfig(function=f"{__name__}:{name}", isolated=isolated)) for name in ("looks", "takes_all")
    ]
    assert score(rewards, batch) == [[0, 1, 2, 1], [0, 22, 20, 22]]
    if isolated:
        return
    (given,) = SEEN
    pictures = [picture(20 + n, 10, seed=n) for n in range(3)]
    for row, prompt, images, first in zip(batch.rows, *given.values(), strict=True):
        own = [pictures[number] for number in row["images"]]
        assert [it.tobytes() for it in images] == [it.tobytes() for it in own]
        assert (first is None) if not own else (first is images[0])
        text = row["prompt"][0]["content"].replace(MARK, "")
        expected: Any = [{"role": "user", "content": text}]
        if own:
            expected = prepare_multimodal_messages(expected, images=images)
        assert prompt == expected
