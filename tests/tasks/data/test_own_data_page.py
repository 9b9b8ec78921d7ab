"""What the page on your own data says of each format is taken by the contract, word for word."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from examples import tiny
from grpo_core.config.files import parse_config
from tests.conftest import config_values
from tests.rows import screen
from tests.tasks.data.test_columns import GSM8K, MBPP, TLDR
from tests.tasks.data.test_own_schema import _write

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "own-data.md").read_text()
CONFIGURATIONS = [tomllib.loads(block) for block in re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]
MODULE = "\n\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
CHAT = [
    {"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": f"It is {n}."}]}
    for n in range(12)
]


@pytest.mark.parametrize(
    ("number", "rows", "prompt"),
    [
        (0, GSM8K, [{"role": "user", "content": GSM8K[0]["question"]}]),
        (
            1,
            MBPP,
            [
                {
                    "role": "user",
                    "content": f"{MBPP[0]['text']}\nThe code has to pass:\n" + "\n".join(MBPP[0]["test_list"]),
                }
            ],
        ),
        (2, TLDR, TLDR[0]["prompt"]),
        (3, CHAT, [{"role": "user", "content": "Say 0"}]),
        (4, GSM8K, GSM8K[0]["question"]),
    ],
    ids=["GSM8K", "MBPP", "TL;DR", "chat", "schema"],
)
def test_each_format_of_the_page_is_taken_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, rows: list[dict[str, Any]], prompt: Any
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_data", raising=False)
    (tmp_path / "my_data.py").write_text(MODULE)
    tokenizer = tiny.make_tokenizer([])
    tokenizer.save_pretrained(tmp_path / "model")
    tiny.make_model(tokenizer, context=1024).save_pretrained(tmp_path / "model")
    _write(tmp_path / "train.jsonl", rows[:8])
    _write(tmp_path / "eval.jsonl", rows[8:])
    said = CONFIGURATIONS[number]
    values = config_values(tmp_path / "model", tmp_path)
    values |= {key: said[key] for key in ("rewards", "rollout") if key in said}
    values["data"] = said["data"] | {key: str(tmp_path / f"{key}.jsonl") for key in ("train", "eval")}
    if number == 4:  # the rest is as in the first
        values["rewards"] = CONFIGURATIONS[0]["rewards"]
    screened = screen(parse_config(values))
    assert (screened.shape, screened.report["findings"]) == ([], [])
    first = screened.kept["train"]["prompt"][0]
    asked = first if isinstance(first, str) else [message for message in first.to_list() if message["role"] != "system"]
    assert asked == prompt
    assert screened.kept["train"].height == 8


def test_the_first_configuration_is_complete() -> None:
    parse_config(CONFIGURATIONS[0])
    assert len(CONFIGURATIONS) == 5
