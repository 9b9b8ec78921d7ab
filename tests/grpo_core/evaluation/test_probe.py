"""How often the base model solves each training prompt."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from grpo_core.data.curriculum import no_rates, read_rates
from grpo_core.errors import ConfigError
from grpo_core.evaluation import probe as module
from grpo_core.evaluation.probe import probe, right_ones, summary
from grpo_core.rollout.collect import Sample
from grpo_core.rollout.types import Completion
from grpo_core.run_files import PROBED
from grpo_core.training.loop import train
from tests.conftest import make_run, with_keys
from tests.grpo_core.training.training import metrics_of


def _run(folder: Path, values: dict[str, Any], **keys: Any) -> Path:
    values["data"]["curriculum"] = {"kind": "variance", "probe": 3}
    values["evaluation"] = {"accuracy_reward": "length"}
    return make_run(folder, with_keys(values, **keys), 10)


def test_each_prompt_is_sampled_as_often_as_asked_and_alike_in_whatever_parts(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _run(tmp_path / "run", values)
    found = []
    for most in (4096, 4):
        monkeypatch.setattr(module, "PROMPTS", most)
        (output := tmp_path / str(most)).mkdir()
        found.append(probe(run, output))
    assert found[0] == found[1]
    files = [pq.read_table(tmp_path / str(most) / "pass_rates.parquet") for most in (4096, 4)]
    assert files[0].equals(files[1])
    rates = read_rates(tmp_path / "4" / "pass_rates.parquet", 10)
    assert rates.completions.tolist() == [3] * 10 and rates.last_step.tolist() == [0] * 10
    assert len({*rates.passed.tolist()}) > 1
    assert found[0]["mean"] == pytest.approx(rates.rate.mean())


@pytest.mark.slow
def test_a_training_begins_with_the_probes_rates_and_adds_to_them(values: dict[str, Any], tmp_path: Path) -> None:
    run = _run(tmp_path / "run", values, max_steps=2)
    with pytest.raises(FileNotFoundError, match="probe"):
        train(run, run / "training")
    (run / "probe").mkdir()
    probe(run, run / "probe")
    train(run, run / "training")
    first, kept = read_rates(run / PROBED, 10), read_rates(run / "training" / "pass_rates.parquet", 10)
    assert metrics_of(run)[0]["curriculum/pass_rate"] == pytest.approx(first.rate.mean())
    assert (kept.completions >= 3).all() and kept.completions.sum() == 30 + 2 * 16
    assert (kept.passed >= first.passed - 1e-9).all()


def test_demonstrations_are_the_different_completions_that_pass_in_full_and_ended_by_themselves() -> None:
    draw = random.Random(0)
    samples, shares, expected = list[Sample](), list[float](), list[tuple[int, list[int], list[int]]]()
    for _ in range(200):
        row, ids, cut = draw.randrange(3), [draw.randrange(2) for _ in range(draw.randint(1, 4))], draw.random() < 0.3
        mask = draw.choice([None, [*([0] * (len(ids) - 1)), 1]])  # of a conversation, the policy's own tokens
        samples.append(Sample(row, [row], Completion(ids, [0.0] * len(ids), cut, mask), "", []))
        shares.append(draw.choice([1.0, 0.999, 0.0, math.nan]))
        if shares[-1] == 1 and not cut and not any(each[:2] == (row, ids) for each in expected):
            expected.append((row, ids, mask or [1] * len(ids)))
    found = right_ones(samples, shares)
    assert [(*it["prompt_ids"], it["completion_ids"], it["trained_tokens"]) for it in found] == expected
    assert 10 < len(expected) < 90


def test_a_summary_counts_never_and_always_solved_and_tenths() -> None:
    rates = no_rates(6)
    rates.passed[:5], rates.completions[:5] = [0, 1, 2, 4, 4], 4
    assert summary(rates) == {
        "prompts": 6,
        "scored": 5,
        "never": 1,
        "always": 2,
        "mean": pytest.approx(0.55),
        "histogram": [1, 0, 1, 0, 0, 1, 0, 0, 0, 2],
    }
    assert summary(no_rates(2))["mean"] is None


def test_a_probe_without_a_range_of_its_reward_is_refused_before_a_model_is_loaded(
    values: dict[str, Any], tmp_path: Path
) -> None:
    values["rewards"] = [{"function": "char_length", "args": {"target": 3}}]
    values["data"]["curriculum"] = {"probe": 3}
    run = make_run(tmp_path / "run", values)
    with pytest.raises(ConfigError, match=r"data.curriculum.probe=3 goes by pass rates.*'char_length'.*range = "):
        probe(run, tmp_path)
