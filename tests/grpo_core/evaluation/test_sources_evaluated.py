"""Held-out prompts of several sources: figures of all, and of each source as of a set of its own."""

from __future__ import annotations

import copy
import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.evaluation.comparison import compare_policies
from grpo_core.evaluation.outcomes import deciding_metric, outcomes
from grpo_core.rollout.requests import evaluation_request
from tasks.registry.gate import Contestant, Verdict, decide

VALUES: dict[str, Any] = {
    "name": "mixed",
    "model": {"name_or_path": "base"},
    "data": {
        "sources": [
            {"name": "maths", "train": "m", "eval": "me", "rewards": ["answer", "form"]},
            {"name": "code", "train": "c", "eval": "ce", "rewards": ["tests"]},
        ]
    },
    "rewards": [
        {"function": "m:answer", "range": [0, 1]},
        {"function": "m:form", "weight": 0.5, "range": [0, 1]},
        {"function": "m:tests", "range": [0, 1]},
    ],
}
OWN = {"maths": ("answer", "form"), "code": ("tests",)}
POLICIES = ("base", "champion", "trained")


def _samples(rates: dict[str, dict[str, float]], prompts: int = 150, samples: int = 2, seed: int = 0) -> pl.DataFrame:
    """The sources' prompts take turns; `rates[policy][source]`: the share of completions that are right."""
    rng, rows = random.Random(seed), []
    for row in range(2 * prompts):
        source = ("maths", "code")[row % 2]
        for sample in range(samples):
            found: dict[str, Any] = {"set": "held-out", "row": row, "sample": sample, "prompt": f"{source} {row}"}
            found["source"] = source
            for policy in POLICIES:
                found |= {f"{policy}/completion": "x", f"{policy}/completion_tokens": rng.randint(1, 9)}
                found |= {f"{policy}/truncated": False, f"{policy}/kl": 0.1}
                for reward in ("answer", "form", "tests"):
                    value = float(rng.random() < rates[policy][source]) if reward in OWN[source] else None
                    found[f"{policy}/rewards/{reward}"] = value
            rows.append(found)
    return pl.DataFrame(rows, infer_schema_length=None)


EVEN = {"maths": 0.5, "code": 0.5}
SAMPLES = _samples({"base": EVEN, "champion": EVEN, "trained": {"maths": 0.8, "code": 0.3}})


def _config(**promotion: Any) -> RunConfig:
    return parse_config({**copy.deepcopy(VALUES), "promotion": promotion})


def test_a_held_out_prompt_is_answered_within_its_sources_limit_and_the_evaluations() -> None:
    values = copy.deepcopy(VALUES) | {"evaluation": {"max_completion_length": 20}}
    for source, limit in zip(values["data"]["sources"], (5, 30), strict=True):
        source["max_completion_length"] = limit
    prompts: Any = SimpleNamespace(rows=[{"source": "maths"}, {"source": "code"}], ids=[[1], [2]])
    requests = [evaluation_request(parse_config(values), prompts, row) for row in range(2)]
    assert [request.max_tokens for request in requests] == [5, 20]


def _alone(source: str) -> pl.DataFrame:
    """The samples of one source, as those of a run that has no other."""
    own = SAMPLES.filter(pl.col("source") == source).drop("source")
    return own.drop(
        column for column in own.columns if "/rewards/" in column and column.split("/")[-1] not in OWN[source]
    )


@pytest.mark.slow
@pytest.mark.parametrize("source", ["maths", "code"])
def test_a_source_s_figures_are_those_of_a_run_on_it_alone(source: str) -> None:
    values = copy.deepcopy(VALUES) | {
        "data": {"train": "t", "eval": "e"},
        "evaluation": {"num_samples": 2, "temperature": 1.0},
    }
    values["rewards"] = [reward for reward in values["rewards"] if reward["function"][2:] in OWN[source]]
    alone = compare_policies(_alone(source), parse_config(values), POLICIES)["held-out"]
    both = compare_policies(
        SAMPLES, parse_config({**VALUES, "evaluation": {"num_samples": 2, "temperature": 1.0}}), POLICIES
    )
    assert [*both] == ["held-out", "maths", "code"]
    of_source = both[source]
    assert [*of_source["policies"]["trained"]] == [*alone["policies"]["trained"]]
    for policy in POLICIES:
        for metric, figures in alone["policies"][policy].items():
            found = of_source["policies"][policy][metric]
            assert (found["mean"], found["num_units"]) == pytest.approx((figures["mean"], figures["num_units"]))
    assert of_source["differences"]["base"]["accuracy"] == alone["differences"]["base"]["accuracy"]
    assert of_source["differences"]["base"]["pass@2"] == alone["differences"]["base"]["pass@2"]


def test_a_held_out_prompt_is_right_by_the_reward_of_its_source() -> None:
    config = _config()
    right = outcomes(SAMPLES, "held-out", "trained", "accuracy", config.rewards, config.accuracy_reward)
    own = {"maths": "answer", "code": "tests"}
    expected: dict[int, list[float]] = {}
    for row in SAMPLES.to_dicts():
        expected.setdefault(row["row"], []).append(row[f"trained/rewards/{own[row['source']]}"])
    assert right.tolist() == [np.mean(expected[row]) for row in sorted(expected)]
    reward = outcomes(SAMPLES, "code", "trained", "rewards/answer/mean", config.rewards, config.accuracy_reward)
    assert len(reward) == 150 and all(map(math.isnan, reward))


def test_policies_are_compared_by_accuracy_if_the_reward_of_every_source_says_right_or_wrong() -> None:
    judges = _config().accuracy_reward
    assert deciding_metric(SAMPLES, judges) == "accuracy"
    graded = SAMPLES.with_columns(pl.col("base/rewards/tests") * 0.5)
    assert deciding_metric(graded, judges) == "reward"
    assert deciding_metric(SAMPLES.with_columns(pl.col("base/rewards/form") * 0.5), judges) == "accuracy"


def _decided(samples: pl.DataFrame, **promotion: Any) -> Verdict:
    return decide(
        _config(**promotion), Contestant("version 2", samples, "trained"), Contestant("version 1", samples, "champion")
    )


def test_a_guard_on_a_source_refuses_a_version_that_has_forgotten_it() -> None:
    guards = [{"set": source, "metric": "accuracy", "max_drop": 0.05} for source in ("maths", "code")]
    gained = _samples({"base": EVEN, "champion": EVEN, "trained": {"maths": 0.95, "code": 0.38}})
    assert _decided(gained).accepted, "better on all held-out prompts together"
    guarded = _decided(gained, guards=guards)
    maths, code = guarded.comparisons[1:]
    assert (guarded.accepted, maths.broken) == (False, None)
    assert (maths.num_prompts, code.num_prompts) == (150, 150)
    assert code.broken is not None and "accuracy on code" in code.broken and "max_drop 0.05 is broken" in code.broken


def test_a_promotion_can_be_decided_on_one_source() -> None:
    assert _decided(SAMPLES, set="maths").accepted
    assert not _decided(SAMPLES, set="code").accepted
