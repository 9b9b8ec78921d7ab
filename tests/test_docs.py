"""What the documentation names exists: tests, configuration keys, metrics."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

from grpo_core.config import describe_keys, load_config
from grpo_core.trainer import train
from tests.conftest import config_values, make_run, with_keys

ROOT = Path(__file__).parents[1]


def test_every_test_that_parity_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "parity.md").read_text()))
    source = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 30
    assert {name for name in named if f"def {name}(" not in source} == set()


def test_every_key_of_the_algorithm_and_of_health_is_documented() -> None:
    text = (ROOT / "docs" / "algorithm.md").read_text()
    keys = [key.partition(".") for key, *_ in describe_keys()]
    documented = {name for section, _, name in keys if section in ("algorithm", "health")}
    assert len(documented) > 40
    assert {name for name in documented if not re.search(rf"`{name}\b", text)} == set()


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "recipes").glob("*.md")), ids=lambda page: page.stem)
def test_every_run_of_a_recipes_page_is_one_that_its_configuration_takes(page: Path) -> None:
    text = page.read_text().replace("\\\n", " ")
    runs = re.findall(r"^    grpo run (configs/\w+\.toml)(.*?)(?:#.*)?$", text, re.MULTILINE)
    assert runs
    for config, options in runs:
        overrides = shlex.split(options)
        assert set(overrides[::2]) <= {"--set"}
        load_config(ROOT / config, overrides[1::2])


@pytest.fixture
def values(model_folder: Path, tmp_path: Path) -> Iterator[dict[str, Any]]:
    yield config_values(model_folder, tmp_path)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    "keys",
    [
        {"beta": 0.1, "eval_steps": 2, "dynamic_sample": True, "off_policy_mask_threshold": 0.1, "entropy_coef": 0.1},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_mask"},
    ],
    ids=["clipped", "cispo", "vespo"],
)
def test_every_metric_of_a_training_is_documented(values: dict[str, Any], tmp_path: Path, keys: dict[str, Any]) -> None:
    run = make_run(tmp_path / "run", with_keys(values, **keys))
    train(run, run / "training")
    text = (ROOT / "docs" / "metrics.md").read_text()
    for line in (run / "training" / "metrics.jsonl").read_text().splitlines():
        names = {re.sub(r"rewards/\w+/", "rewards/NAME/", name) for name in json.loads(line)} - {"step"}
        assert {name for name in names if f"`{name}`" not in text} == set()
