"""Each recipe's small form as a user runs it: `grpo init`, its data and base model, `grpo run`. The reward rises."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import mean

import pytest

from flows.cli.init import RECIPES, write_project
from tests.e2e.commands import run
from tests.serving import free_ports, vllm_serve

CHANGES = {"summaries": ["--set", "rollout.engine=vllm-server"]}  # as its page has it for a GPU
# What else a recipe promises of its trained policy beside its base: bounds of the difference on held-out prompts.
PROMISES = {
    "calculator": ("reward", 0.4, 1.0),
    "distil": ("accuracy", 0.7, 1.1),
    "guess": ("conversations/mean_turns", -8.0, 0.0),
    "shapes": ("accuracy", 0.2, 1.1),
    "warmstart": ("accuracy", 0.6, 1.1),
}
MEASURED = {"distil": ("rewards/numeric_match/mean", "accuracy")}  # what rises where no reward counts
ENDS = 5  # updates at the start and at the end of a training that are compared

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_small_form_of_a_recipe_learns(recipe: str, tmp_path: Path) -> None:
    project = write_project("small", recipe, tmp_path)
    _python(project, f"examples.{recipe}.make")
    with _judge(project) if recipe == "writing" else nullcontext(CHANGES.get(recipe, [])) as changes:
        _python(project, "flows.cli.main", "run", f"configs/{recipe}.toml", *changes)
    if recipe == "smollm":
        _python(project, "examples.smollm.show")
    folder = project / "storage" / "runs" / "small"
    assert json.loads((folder / "registration.json").read_text())["version"] == "1"
    lines = (folder / "training" / "metrics.jsonl").read_text().splitlines()
    trained, evaluated = MEASURED.get(recipe, ("reward", "reward"))
    rewards = [json.loads(line)[trained] for line in lines]
    assert mean(rewards[-ENDS:]) > mean(rewards[:ENDS])
    report = json.loads((folder / "evaluation" / "report.json").read_text())
    differences = report["sets"]["held-out"]["differences"]["base"]
    assert differences[evaluated]["low"] > 0, f"on held-out prompts: {differences}"
    metric, least, most = PROMISES.get(recipe, (evaluated, 0.0, math.inf))
    assert least < differences[metric]["low"] and differences[metric]["high"] < most, f"{metric}: {differences}"
    if by_grpo := report["sets"]["held-out"]["differences"].get("warm-start"):
        assert by_grpo[metric]["low"] > 0.1, f"{metric}, beside the warm start: {by_grpo}"


@contextmanager
def _judge(project: Path) -> Iterator[list[str]]:
    """The recipe's judge, served as its page says; gives the options that say where it is and what it is called."""
    folder, (port,) = project / "storage" / "examples" / "writing" / "judge", free_ports(1)
    with vllm_serve(folder, port, project / "judge.log", max_model_len=512) as url:
        yield ["--set", f"rewards.0.args.base_url={url}/v1", "--set", "rewards.0.args.model=sums"]


def _python(project: Path, *module: str) -> None:
    left_out = ("PREFECT_", "MLFLOW_", "PYTHONSAFEPATH")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
    run([sys.executable, "-m", *module], project, {**inherited, "GRPO_STORAGE": str(project / "storage")})
