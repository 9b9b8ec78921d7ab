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

from flows.project import RECIPES
from grpo_core.config import describe_keys, load_config
from grpo_core.forecast import ModelShape, PromptLengths, peak_memory
from grpo_core.plan import make_plan, plan_inputs
from grpo_core.trainer import train
from tests.conftest import config_values, make_run, with_keys

ROOT = Path(__file__).parents[1]
SHAPES = {  # of Qwen2 and Qwen2.5, from their config.json
    "0.5B": ModelShape(24, 896, 896, 128, 4864, 151_936, 494_032_768),
    "1.5B": ModelShape(28, 1536, 1536, 256, 8960, 151_936, 1_543_714_304),
}


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


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "tutorials" / "recipes").glob("*.md")), ids=lambda page: page.stem
)
def test_every_run_of_a_recipes_page_is_one_that_its_configuration_takes(page: Path) -> None:
    runs = _runs(page)
    assert runs
    for config, overrides in runs:
        load_config(ROOT / config, overrides)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipes_gpu_form_is_what_its_configuration_marks_and_fits_a_gpu(recipe: str) -> None:
    """Of 80 GB, by the forecast, with what vLLM takes of it and with room."""
    runs = _runs(ROOT / "docs" / "tutorials" / "recipes" / f"{recipe}.md")
    [(path, overrides)] = [run for run in runs if any(it.startswith("model.name_or_path=") for it in run[1])]
    text = (ROOT / path).read_text()
    found = {key.rpartition(".")[2]: value for key, value in (override.split("=", 1) for override in overrides)}
    marked: dict[str, float] = {}
    for key, said in re.findall(r"^(?:(\w+) = .*)?# (?:.*; )?GPU: (.*)$", text, re.MULTILINE):
        numbers = re.findall(r"(?:^|(\w+) = )(\d[\d.e-]*)\b", said)
        marked |= {name or key: float(number) for name, number in numbers}
    assert {"max_completion_length", "per_device_train_batch_size", "gradient_accumulation_steps"} <= marked.keys()
    assert {name: float(found[name]) for name in marked} == marked
    assert "# GPU: mixed_precision" in text and found["mixed_precision"] == "bf16"
    config = load_config(ROOT / path, ["rollout.engine=vllm", *(it for it in overrides if "rollout.engine" not in it)])
    shape = SHAPES["1.5B" if "1.5B" in config.model.name_or_path else "0.5B"]
    plan = make_plan(plan_inputs(config, 5000))
    needed = peak_memory(config, plan, shape, PromptLengths(256, 256, "assumed"), "GPU")
    assert needed["peak_memory_gib"] < 60


def _runs(page: Path) -> list[tuple[str, list[str]]]:
    """What a page runs: the configuration and the keys that it sets."""
    text = page.read_text().replace("\\\n", " ")
    runs = re.findall(r"^grpo run (configs/\w+\.toml)(.*?)(?:#.*)?$", text, re.MULTILINE)
    assert all(set(shlex.split(options)[::2]) <= {"--set"} for _, options in runs)
    return [(config, shlex.split(options)[1::2]) for config, options in runs]


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
