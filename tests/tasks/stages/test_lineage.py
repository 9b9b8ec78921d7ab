"""An edit reruns the stages that depend on it, and no others."""

from __future__ import annotations

import copy
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_core.config.base import flatten
from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.evaluation.run import outcomes_key
from grpo_core.rewards.registry import BUILTIN
from tasks.stages import table
from tasks.stages.lineage import lineage_inputs, lineage_keys
from tests.conftest import config_values, with_keys, write_sums

STAGES = [stage.name for stage in table.STAGES]


@pytest.fixture
def values(tmp_path: Path, model_folder: Path) -> dict[str, Any]:
    write_sums(tmp_path / "train.parquet", 10, 34)
    write_sums(tmp_path / "eval.parquet", 60, 76)
    return config_values(model_folder, tmp_path)


def test_another_seed_makes_the_plan_of_several_sources_again_since_their_counts_are_others(
    values: dict[str, Any],
) -> None:
    sources = [{"name": name, "train": name, "eval": f"{name}-eval"} for name in ("maths", "code")]
    several = {**values, "data": {"sources": sources}}
    assert _stale(several, {**several, "seed": 1})[0] == "plan"
    assert _stale(values, {**values, "seed": 1})[0] == "train"


FIXED = {"seed", "name", "model.revision", "rollout.max_completion_length", "evaluation.max_completion_length"}


def test_a_key_at_its_default_is_no_part_of_a_lineage_so_that_a_new_key_makes_no_run_stale(
    values: dict[str, Any],
) -> None:
    parts = {name for inputs in lineage_inputs(parse_config(values)).values() for name in inputs}
    keys = {name for name in parts if name.partition(".")[0] in RunConfig.model_fields}
    assert keys - flatten(values).keys() - FIXED == {
        *("train.completions_per_update", "train.completions_per_generation"),
        *("rewards.0.name", "rewards.1.name"),
    }


def test_another_version_of_a_built_in_reward_trains_again_what_it_scored(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_config(values)
    before = lineage_keys(config)
    monkeypatch.setitem(BUILTIN, "rouge", replace(BUILTIN["rouge"], version=2))
    assert lineage_keys(config) == before
    monkeypatch.setitem(BUILTIN, "length", replace(BUILTIN["length"], version=2))
    assert all(lineage_keys(config)[stage] != before[stage] for stage in STAGES)


def _stale(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    old, new = lineage_keys(parse_config(before)), lineage_keys(parse_config(after))
    return [stage for stage in STAGES if old[stage] != new[stage]]


@pytest.mark.parametrize(
    ("section", "key", "value", "first"),
    [
        ("data", "eval_split", "validation", "validate"),
        ("data", "columns", {"answer": "solution"}, "validate"),
        ("data", "system_prompt", "Be brief.", "validate"),
        ("train", "max_steps", 9, "plan"),
        ("rollout", "temperature", 0.7, "plan"),
        ("model", "lora_r", 8, "plan"),
        ("algorithm", "beta", 0.1, "plan"),
        ("algorithm", "epsilon", 0.1, "train"),
        ("evaluation", "confidence", 0.9, "evaluate"),
        ("registry", "alias", "challenger", "register"),
        ("promotion", "min_gain", 0.1, "register"),
    ],
)
def test_an_edit_makes_its_own_stage_and_the_later_ones_stale(
    values: dict[str, Any], section: str, key: str, value: Any, first: str
) -> None:
    edited = copy.deepcopy(values)
    edited.setdefault(section, {})[key] = value
    assert _stale(values, edited) == STAGES[STAGES.index(first) :]


def test_the_content_of_an_adapter_to_start_from_counts_and_its_place_does_not(
    values: dict[str, Any], tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("one", "same", "other")]
    for folder in folders:
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_text("weights" if folder.name == "other" else "others")
    one, same, other = (with_keys(values, use_peft=True, adapter=str(folder)) for folder in folders)
    assert _stale(one, same) == []
    assert _stale(one, other) == _stale(with_keys(values, use_peft=True), one) == STAGES[1:]


def test_the_content_of_a_recording_counts_and_its_place_does_not(values: dict[str, Any], tmp_path: Path) -> None:
    """Nor does whether the recorded run has finished since."""
    places = {"one": "training", "same": "training.partial", "other": "training"}
    for name, training in places.items():
        folder = tmp_path / name / training / "completions"
        folder.mkdir(parents=True)
        (folder / "rollout-000000.parquet").write_text("others" if name == "other" else "samples")
    one, same, other = (with_keys(values, engine="recorded", recording=str(tmp_path / name)) for name in places)
    assert _stale(one, same) == []
    assert _stale(one, other) == _stale(values, one) == STAGES[1:]


def test_a_limit_that_only_watches_is_no_reason_to_run_a_stage_again(values: dict[str, Any]) -> None:
    assert _stale(values, {**values, "health": {"max_kl": 3.0}}) == []
    edited = copy.deepcopy(values)
    edited["rollout"]["max_sync_drift"] = 0.5
    assert _stale(values, edited) == []


def test_a_limit_of_a_reward_is_tried_anew_and_trains_nothing_again(values: dict[str, Any]) -> None:
    for key, value in (("timeout", 7.0), ("range", [0.0, 2.0]), ("isolated", True)):
        edited = copy.deepcopy(values)
        edited["rewards"][0][key] = value
        assert _stale(values, edited) == ["validate"]


@pytest.mark.parametrize(
    "change", [{"weight": 2.0}, {"clip": [0.0, 0.5]}, {"gate": "numeric_match"}, {"name": "short"}]
)
def test_another_composition_of_the_rewards_trains_again(values: dict[str, Any], change: dict[str, Any]) -> None:
    edited = copy.deepcopy(values)
    edited["rewards"][1] |= change
    assert _stale(values, edited) == STAGES


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("rollout", "gpu_memory_utilization", 0.5),
        ("rollout", "cpu_kv_cache_gib", 2),
        ("train", "save_steps", 7),
        ("train", "save_total_limit", 7),
        ("train", "max_restarts", 3),
        ("train", "hang_timeout", 60.0),
        ("launch", "hosts", ["alpha", "beta"]),
    ],
)
def test_memory_and_disk_are_no_reason_to_run_a_stage_again(
    values: dict[str, Any], section: str, key: str, value: Any
) -> None:
    edited = copy.deepcopy(values)
    edited.setdefault(section, {})[key] = value
    assert _stale(values, edited) == []


def test_other_machines_change_the_forecast_and_train_nothing_again(values: dict[str, Any]) -> None:
    values["train"]["num_processes"] = 4
    edited = copy.deepcopy(values)
    edited["train"]["num_machines"] = 2
    edited["launch"] = {"launcher": "ssh", "hosts": ["alpha", "beta"]}
    assert _stale(values, edited) == ["plan"]


def test_recomputing_activations_changes_the_forecast_and_trains_nothing_again(values: dict[str, Any]) -> None:
    edited = copy.deepcopy(values)
    edited["train"]["gradient_checkpointing"] = True
    assert _stale(values, edited) == ["plan"]


def test_how_an_evaluation_is_reported_concerns_no_training(values: dict[str, Any]) -> None:
    values["train"]["eval_steps"] = 2
    reported = {"evaluation": {"confidence": 0.9}}
    assert _stale(values, {**values, **reported}) == ["evaluate", "register"]


def test_how_evaluations_sample_concerns_a_training_that_evaluates(values: dict[str, Any]) -> None:
    hot = {"evaluation": {"temperature": 1.0}}
    assert _stale(values, {**values, **hot}) == ["evaluate", "register"]
    values["train"]["eval_steps"] = 2
    assert _stale(values, {**values, **hot}) == ["train", "evaluate", "register"]


def test_a_further_evaluation_set_is_validated_and_evaluated_on_by_its_content_and_concerns_no_training(
    values: dict[str, Any], tmp_path: Path
) -> None:
    values["train"]["eval_steps"] = 2
    hard = {"name": "hard", "data": str(write_sums(tmp_path / "hard.parquet", 80, 90))}
    added = {**values, "evaluation": {"sets": [hard]}}
    assert _stale(values, added) == ["validate", "evaluate", "register"]
    before = lineage_keys(parse_config(added))
    write_sums(tmp_path / "hard.parquet", 80, 91)
    after = lineage_keys(parse_config(added))
    assert [stage for stage in STAGES if before[stage] != after[stage]] == ["validate", "evaluate", "register"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_samples", 4), ("category_column", "kind"), ("answer_pattern", "(.)"), ("confidence", 0.9)],
)
def test_what_only_the_final_evaluation_does_concerns_no_training(values: dict[str, Any], key: str, value: Any) -> None:
    values["train"]["eval_steps"] = 2
    values["evaluation"] = {"temperature": 0.7}
    edited = {**values, "evaluation": {"temperature": 0.7, key: value}}
    assert _stale(values, edited) == ["evaluate", "register"]


def test_groups_are_validated_and_concern_no_training(values: dict[str, Any]) -> None:
    values["train"]["eval_steps"] = 2
    assert _stale(values, {**values, "evaluation": {"group_column": "n"}}) == ["validate", "evaluate", "register"]


def test_the_seed_concerns_training_and_what_follows(values: dict[str, Any]) -> None:
    assert _stale(values, {**values, "seed": 1}) == ["train", "evaluate", "register"]


def test_data_is_known_by_content_not_by_name(values: dict[str, Any]) -> None:
    path = Path(values["data"]["train"])
    before = lineage_keys(parse_config(values))
    content = path.read_bytes()
    write_sums(path, 10, 35)
    changed = lineage_keys(parse_config(values))
    path.write_bytes(content)
    assert changed["validate"] != before["validate"]
    assert lineage_keys(parse_config(values)) == before


def test_another_name_or_place_of_the_same_inputs_makes_nothing_stale(
    values: dict[str, Any], model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hard = {"name": "hard", "data": str(write_sums(tmp_path / "hard.parquet", 80, 90))}
    classifier = {"function": "classifier", "name": "tone", "args": {"model": str(model_folder)}}
    values = {**values, "evaluation": {"sets": [hard]}, "rewards": [*values["rewards"], classifier]}
    moved = copy.deepcopy(values)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(model_folder, elsewhere / "model")
    shutil.copytree(model_folder, elsewhere / "scorer")
    for name in ("train", "eval", "hard"):
        shutil.copy(tmp_path / f"{name}.parquet", elsewhere / f"my-{name}.parquet")
    (elsewhere / "model" / "README.md").write_text("# Notes")
    (elsewhere / "model" / ".cache").mkdir()
    (elsewhere / "model" / ".cache" / "lock").touch()
    moved["model"]["name_or_path"] = "model"
    moved["data"] |= {"train": "my-train.parquet", "eval": str(elsewhere / "my-eval.parquet")}
    moved["evaluation"]["sets"][0]["data"] = "my-hard.parquet"
    moved["rewards"][-1]["args"]["model"] = "scorer"
    monkeypatch.chdir(elsewhere)
    assert _stale(values, moved) == []


def test_a_scoring_model_that_changed_in_its_place_scores_again(
    values: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    """Its outcomes cannot be paired with those of the former one either."""
    scorer = tmp_path / "scorer"
    shutil.copytree(model_folder, scorer)
    values["rewards"].append({"function": "classifier", "args": {"model": str(scorer)}})
    config, files = parse_config(values), {"held-out": Path(values["data"]["eval"])}
    keys, key = lineage_keys(config), outcomes_key(config, files)
    assert outcomes_key(config, files) == key
    (scorer / "config.json").write_text((scorer / "config.json").read_text() + " ")
    assert all(lineage_keys(config)[stage] != keys[stage] for stage in STAGES)
    assert outcomes_key(config, files) != key


def test_a_changed_base_model_makes_everything_stale(values: dict[str, Any], tmp_path: Path) -> None:
    model = tmp_path / "copy"
    model.mkdir()
    (model / "weights").write_text("one")
    values["model"]["name_or_path"] = str(model)
    before = lineage_keys(parse_config(values))
    (model / "weights").write_text("two!")
    assert all(lineage_keys(parse_config(values))[stage] != before[stage] for stage in STAGES)


def test_a_changed_line_in_a_reward_function_trains_again(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "house_rewards.py"
    module.write_text("def shorter(completions):\n    return [-len(c) for c in completions]\n")
    monkeypatch.syspath_prepend(tmp_path)
    values["rewards"] = [{"function": "house_rewards:shorter"}]
    before = lineage_keys(parse_config(values))
    module.write_text("def shorter(completions):\n    return [-2 * len(c) for c in completions]\n")
    after = lineage_keys(parse_config(values))
    assert [stage for stage in STAGES if after[stage] != before[stage]] == STAGES


OBJECT = """
class Shorter:
    def __call__(self, completions):
        return [{factor} for _ in completions]
reward = Shorter()
"""
PARTIAL = """
from functools import partial
def constant(completions, value):
    return [value for _ in completions]
reward = partial(constant, value={factor})
"""


@pytest.mark.parametrize("body", [OBJECT, PARTIAL], ids=["object", "partial"])
def test_whatever_can_be_called_is_a_reward_with_a_source(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    sys.modules.pop("called_rewards", None)
    module = tmp_path / "called_rewards.py"
    module.write_text(body.format(factor=-1))
    monkeypatch.syspath_prepend(tmp_path)
    values["rewards"] = [{"function": "called_rewards:reward"}]
    before = lineage_keys(parse_config(values))
    module.write_text(body.format(factor=-2))
    assert lineage_keys(parse_config(values))["train"] != before["train"]


def test_what_is_only_watched_or_priced_makes_no_version_stale(values: dict[str, Any]) -> None:
    assert _stale(values, {**values, "registry": {"traces_per_batch": 0}}) == []
    assert _stale(values, {**values, "launch": {"gpu_hour_price": 2.5}}) == []
    assert _stale(values, {**values, "registry": {"evaluation_traces": 7}}) == ["register"]
