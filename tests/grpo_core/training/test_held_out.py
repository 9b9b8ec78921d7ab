"""Evaluation in training beside the report of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_core.evaluation.run import evaluate
from grpo_core.training.loop import train
from tests.conftest import make_run, with_keys
from tests.grpo_core.training.training import metrics_of

REPORTED = {
    "eval_reward": "reward",
    "eval_accuracy": "accuracy",
    "eval_rewards/parity/mean": "rewards/parity/mean",
    "eval_completions/mean_length": "completions/mean_length",
    "eval_completions/clipped_ratio": "completions/clipped_ratio",
}


@pytest.mark.parametrize("grouped", [False, True])
def test_a_prompt_or_group_that_is_repeated_counts_once_in_training_as_in_the_report(
    grouped: bool, values: dict[str, Any], tmp_path: Path
) -> None:
    values["rewards"] = [{"function": "tests.grpo_core.training.test_loop:parity"}]
    values["evaluation"] = {"temperature": 1.0} | ({"group_column": "group"} if grouped else {})
    run = make_run(tmp_path / "run", with_keys(values, max_steps=1, eval_steps=1, learning_rate=1e-5))
    repeats = [9, 1, 1, 4, 1]
    prompts = [f"{50 + n}+{n}=" for n, times in enumerate(repeats) for _ in range(times)]
    groups = [str(n % 2) for n, times in enumerate(repeats) for _ in range(times)]
    pq.write_table(pa.table({"prompt": prompts, "group": groups}), run / "dataset" / "eval.parquet")
    train(run, run / "training")
    (in_training,) = metrics_of(run)
    report = evaluate(run, run)["sets"]["held-out"]["policies"]["trained"]
    assert {name: in_training[name] for name in REPORTED} == pytest.approx(
        {name: report[metric]["mean"] for name, metric in REPORTED.items()}
    )
    scores = pq.read_table(run / "training" / "held_out" / "step-000001.parquet")["reward"].to_pylist()
    assert sum(scores) / len(scores) != pytest.approx(in_training["eval_reward"]), "the mean over rows is another"
