"""The examples of the pages for those who come from ms-swift and verl, word for word: the data are taken, and the
reward knows a right answer."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples import tiny
from grpo_core.config.files import parse_config
from grpo_core.rewards.rehearsal import rehearse
from tests.formats import GSM8K
from tests.rows import screen
from tests.tasks.data.test_own_schema import _write

PAGES = Path(__file__).parents[3] / "docs" / "how-to"
OF_VERL = [  # as verl's examples/data_preprocess/gsm8k.py writes them
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": row["question"]}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": row["answer"].rpartition("#### ")[2]},
        "extra_info": {"split": "train", "index": n, "answer": row["answer"], "question": row["question"]},
    }
    for n, row in enumerate(GSM8K)
]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "rows"), [("from-swift", GSM8K), ("from-verl", OF_VERL)])
def test_the_example_of_the_page_is_taken_and_its_reward_knows_a_right_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, rows: list[dict[str, Any]]
) -> None:
    text = (PAGES / f"{page}.md").read_text()
    (module,) = re.findall(r"^```python\n(# (\w+\.py), unchanged\n.*?)^```", text, re.MULTILINE | re.DOTALL)
    (config,) = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / module[1]).write_text(module[0])
    monkeypatch.syspath_prepend(tmp_path)
    tokenizer = tiny.make_tokenizer([])
    tokenizer.save_pretrained(tmp_path / "model")
    tiny.make_model(tokenizer, context=1024).save_pretrained(tmp_path / "model")
    values = tomllib.loads(config)
    values["model"]["name_or_path"] = str(tmp_path / "model")
    for key, part in (("train", rows[:8]), ("eval", rows[8:])):
        path = tmp_path / values["data"][key]
        _write(path, part) if path.suffix == ".jsonl" else pq.write_table(pa.Table.from_pylist(part), path)
        values["data"][key] = str(path)
    parsed = parse_config(values)
    screened = screen(parsed)
    assert (screened.shape, screened.report["findings"]) == ([], [])
    report = rehearse(parsed, screened.kept["train"].to_dicts(), lambda: tokenizer)
    assert report["warnings"] == []
    ((name, given),) = report["rewards"].items()
    assert parsed.rewards[0].function.endswith(name)
    assert (given["right"], given["empty"], given["garbage"]) == (1, 0, 0)
