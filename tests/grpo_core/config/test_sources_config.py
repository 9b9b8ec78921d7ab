"""Several sources in a configuration: what does not go together is refused by its key."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.config.files import dump_config, parse_config
from grpo_core.errors import ConfigError
from grpo_core.planning.plan import plan_inputs
from tests.grpo_core.config.test_config import VALUES

SOURCES = [
    {"name": "maths", "train": "m", "eval": "me", "rewards": ["right", "form"]},
    {"name": "code", "train": "c", "eval": "ce", "rewards": ["tests"]},
]
FULL: dict[str, Any] = {
    **VALUES,
    "data": {"sources": SOURCES},
    "rewards": [{"function": f"m:{name}"} for name in ("right", "form", "tests")],
}


def _with(**changes: Any) -> dict[str, Any]:
    """FULL with `maths`, `code` and sections changed."""
    values = copy.deepcopy(FULL)
    for place, name in enumerate(("maths", "code")):
        values["data"]["sources"][place] |= changes.pop(name, {})
    for section, keys in changes.items():
        values[section] = {**values.get(section, {}), **keys} if isinstance(keys, dict) else keys
    return values


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"code": {"name": "maths"}}, "data: sources ['maths', 'maths'] share a name"),
    ({"code": {"weight": 2.0, "epochs": 0.5}}, "sources.1: weight=2 and epochs=0.5 both say how much"),
    ({"code": {"weight": 2.0}}, "sources: 'maths' has no weight, and others have"),
    ({"code": {"epochs": 1.5}}, "data.sources.1.epochs = 1.5: Input should be less than or equal to 1"),
    ({"data": {"train": "t"}}, "data: train beside data.sources: each source has its own"),
    ({"data": {"system_prompt": "x"}}, "data: system_prompt beside data.sources"),
    ({"code": {"rewards": ["test"]}}, "data.sources.1.rewards names 'test', which is not among the rewards"),
    ({"code": {"rewards": ["right"]}}, "rewards.2 ('tests') scores no source"),
    ({"code": {"environment": "maze"}}, "data.sources.1.environment='maze' is not among the names in environment."),
    ({"code": {"max_completion_length": 1000}}, "data.sources.1.max_completion_length=1000 is more than rollout."),
    ({"code": {"name": "held-out"}}, "data.sources: 'held-out' names the held-out prompts of all sources"),
    ({"evaluation": {"sets": [{"name": "more", "data": "d"}]}}, "evaluation.sets.0.source=None: name one of ['maths',"),
    ({"evaluation": {"sets": [{"name": "code", "data": "d", "source": "code"}]}}, "evaluation.sets.0.name='code' is"),
    ({"promotion": {"set": "other"}}, "promotion.set='other' is not among the evaluation sets ['held-out', 'maths',"),
    (
        {"promotion": {"guards": [{"set": "code", "metric": "rewards/right/mean", "min": 0.1}]}},
        "promotion.guards.0.metric='rewards/right/mean' does not score all prompts of 'code'; it scores",
    ),
    (
        {"promotion": {"guards": [{"metric": "rewards/tests/mean", "min": 0.1}]}},
        "metric='rewards/tests/mean' does not score all prompts of 'held-out'; it scores the sources ['code']",
    ),
    (
        {"promotion": {"set": "maths"}, "train": {"load_best_model_at_end": True, "eval_steps": 1}},
        "train.load_best_model_at_end=true with promotion.set='maths'",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_what_does_not_go_together_with_sources_is_refused_by_its_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(_with(**changes))
    assert message in str(refused.value)


@pytest.mark.parametrize("key", ["name", "train", "eval"])
def test_a_source_needs_a_name_and_both_kinds_of_prompts(key: str) -> None:
    values = copy.deepcopy(FULL)
    del values["data"]["sources"][1][key]
    with pytest.raises(ConfigError, match=rf"data\.sources\.1\.{key}: missing"):
        parse_config(values)


def test_a_gate_has_to_score_the_sources_of_its_reward() -> None:
    rewards = [*FULL["rewards"][:2], {"function": "m:tests", "gate": "right"}]
    with pytest.raises(
        ConfigError, match=r"rewards\.2 \('tests'\) scores the source 'code', its gate 'right' does not"
    ):
        parse_config(_with(rewards=rewards))


def test_sources_are_written_as_they_were_read() -> None:
    config = parse_config(_with(maths={"weight": 2.0, "system_prompt": ""}, code={"weight": 1.0}))
    import tomllib

    assert parse_config(tomllib.loads(dump_config(config))) == config


def test_a_source_s_first_reward_says_what_is_right_where_the_run_s_does_not_score_it() -> None:
    assert parse_config(FULL).accuracy_reward == {"maths": "right", "code": "tests"}
    chosen = _with(evaluation={"accuracy_reward": "form"})
    assert parse_config(chosen).accuracy_reward == {"maths": "form", "code": "tests"}
    assert parse_config(VALUES).accuracy_reward == "exact_match"


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0.01, 100)), min_size=1, max_size=5))
def test_weights_are_the_shares_of_an_epoch_and_one_source_is_used_up(given: list[tuple[int, float]]) -> None:
    sources = [{"name": f"s{n}", "train": "a", "eval": "b", "weight": w} for n, (_, w) in enumerate(given)]
    config = parse_config({**VALUES, "data": {"sources": sources}})
    inputs = plan_inputs(config, *(size for size, _ in given))
    per_epoch = [source.prompts_per_epoch for source in inputs.sources]
    assert inputs.num_prompts == sum(per_epoch)
    assert all(have <= size for have, (size, _) in zip(per_epoch, given, strict=True))
    assert any(have == size for have, (size, _) in zip(per_epoch, given, strict=True))
    scale = min(size / weight for size, weight in given)
    assert all(abs(have - weight * scale) <= 0.5 + 1e-9 for have, (_, weight) in zip(per_epoch, given, strict=True))


def test_without_weights_a_source_gives_its_epochs_of_its_prompts() -> None:
    inputs = plan_inputs(parse_config(_with(code={"epochs": 0.25})), 10, 80)
    assert [source.prompts_per_epoch for source in inputs.sources] == [10, 20]
