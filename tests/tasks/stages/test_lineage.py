"""An edit reruns the stages that depend on it, and no others; what one arm of a sweep has made, the others take
over."""

from __future__ import annotations

import copy
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_core.config.base import flatten
from grpo_core.config.files import parse_config, with_keys
from grpo_core.config.run import RunConfig
from grpo_core.evaluation.run import outcomes_key
from grpo_core.rewards.registry import BUILTIN
from tasks.stages import table
from tasks.stages.arms import sweep_folder
from tasks.stages.condition import conditions
from tasks.stages.lineage import lineage_inputs, lineage_keys
from tasks.stages.run_directory import read_config
from tasks.stages.table import PLAN, VALIDATE
from tests.conftest import write_sums
from tests.tasks.stages.small_stages import WORK, Values, configure, do

STAGES = [stage.name for stage in table.STAGES]


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


EVALUATES = {"train.eval_steps": 2}
SAMPLES = {**EVALUATES, "evaluation.temperature": 0.7}
SCORED = ["validate", "evaluate", "register"]


@pytest.mark.parametrize(
    ("before", "edit", "stale"),
    [
        # Its own stage and the later ones; more of these in test_stage.py.
        ({}, {"data.columns": {"answer": "solution"}}, STAGES),
        ({}, {"data.system_prompt": "Be brief."}, STAGES),
        ({}, {"rollout.temperature": 0.7}, STAGES[1:]),
        ({}, {"model.lora_r": 8}, STAGES[1:]),
        ({}, {"algorithm.beta": 0.1}, STAGES[1:]),
        ({}, {"seed": 1}, STAGES[2:]),
        ({}, {"promotion.min_gain": 0.1}, ["register"]),
        # Another composition of the rewards trains again; a limit of one is tried again.
        ({}, {"rewards.1.weight": 2.0}, STAGES),
        ({}, {"rewards.1.clip": [0.0, 0.5]}, STAGES),
        ({}, {"rewards.1.gate": "numeric_match"}, STAGES),
        ({}, {"rewards.1.name": "short"}, STAGES),
        ({}, {"rewards.0.range": [0.0, 2.0]}, ["validate"]),
        ({}, {"rewards.0.isolated": True}, ["validate"]),
        # Memory and disk, other machines, what only watches or is priced.
        ({}, {"rollout.gpu_memory_utilization": 0.5}, []),
        ({}, {"rollout.cpu_kv_cache_gib": 2}, []),
        ({}, {"rollout.max_sync_drift": 0.5}, []),
        ({}, {"train.save_steps": 7}, []),
        ({}, {"train.save_total_limit": 7}, []),
        ({}, {"train.max_restarts": 3}, []),
        ({}, {"train.hang_timeout": 60.0}, []),
        ({}, {"launch.hosts": ["alpha", "beta"]}, []),
        ({}, {"launch.gpu_hour_price": 2.5}, []),
        ({}, {"registry.traces_per_batch": 0}, []),
        ({}, {"registry.evaluation_traces": 7}, ["register"]),
        (
            {"train.num_processes": 4},
            {"train.num_machines": 2, "launch.launcher": "ssh", "launch.hosts": ["alpha", "beta"]},
            ["plan"],
        ),
        # How evaluations sample concerns a training that evaluates, and how they are reported none.
        ({}, {"evaluation.temperature": 1.0}, STAGES[3:]),
        (EVALUATES, {"evaluation.temperature": 1.0}, STAGES[2:]),
        (EVALUATES, {"evaluation.confidence": 0.9}, STAGES[3:]),
        (EVALUATES, {"evaluation.group_column": "n"}, SCORED),
        (SAMPLES, {"evaluation.num_samples": 4}, STAGES[3:]),
        (SAMPLES, {"evaluation.category_column": "kind"}, STAGES[3:]),
        (SAMPLES, {"evaluation.answer_pattern": "(.)"}, STAGES[3:]),
        (SAMPLES, {"evaluation.confidence": 0.9}, STAGES[3:]),
    ],
)
def test_an_edit_makes_stale_what_depends_on_it_and_nothing_else(
    values: dict[str, Any], before: dict[str, Any], edit: dict[str, Any], stale: list[str]
) -> None:
    values = with_keys(values, before)
    assert _stale(values, with_keys(values, edit)) == stale


def test_the_content_of_an_adapter_to_start_from_counts_and_its_place_does_not(
    values: dict[str, Any], tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("one", "same", "other")]
    for folder in folders:
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_text("weights" if folder.name == "other" else "others")
    one, same, other = (with_keys(values, {"model.use_peft": True, "model.adapter": str(folder)}) for folder in folders)
    assert _stale(one, same) == []
    assert _stale(one, other) == _stale(with_keys(values, {"model.use_peft": True}), one) == STAGES[1:]


def test_the_content_of_a_recording_counts_and_its_place_does_not(values: dict[str, Any], tmp_path: Path) -> None:
    """Nor does whether the recorded run has finished since."""
    places = {"one": "training", "same": "training.partial", "other": "training"}
    for name, training in places.items():
        folder = tmp_path / name / training / "completions"
        folder.mkdir(parents=True)
        (folder / "rollout-000000.parquet").write_text("others" if name == "other" else "samples")
    one, same, other = (
        with_keys(values, {"rollout.engine": "recorded", "rollout.recording": str(tmp_path / name)}) for name in places
    )
    assert _stale(one, same) == []
    assert _stale(one, other) == _stale(values, one) == STAGES[1:]


def test_a_further_evaluation_set_is_validated_and_evaluated_on_by_its_content_and_concerns_no_training(
    values: dict[str, Any], tmp_path: Path
) -> None:
    values["train"]["eval_steps"] = 2
    hard = {"name": "hard", "data": str(write_sums(tmp_path / "hard.parquet", 80, 90))}
    added = {**values, "evaluation": {"sets": [hard]}}
    assert _stale(values, added) == SCORED
    before = lineage_keys(parse_config(added))
    write_sums(tmp_path / "hard.parquet", 80, 91)
    after = lineage_keys(parse_config(added))
    assert [stage for stage in STAGES if before[stage] != after[stage]] == SCORED


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


def test_outcomes_of_rewards_that_weigh_differently_can_be_paired(values: dict[str, Any]) -> None:
    files = {"held-out": Path(values["data"]["eval"])}
    keys = []
    for changes in ({}, {"weight": 2.0}, {"weight": 0.0}, {"args": {"tolerance": 0.5}}):
        changed = {**values, "rewards": [{**values["rewards"][0], **changes}, *values["rewards"][1:]]}
        keys.append(outcomes_key(parse_config(changed), files))
    assert keys[0] == keys[1] == keys[2] != keys[3]


def test_a_changed_base_model_makes_everything_stale(values: dict[str, Any], tmp_path: Path) -> None:
    model = tmp_path / "copy"
    model.mkdir()
    (model / "weights").write_text("one")
    values["model"]["name_or_path"] = str(model)
    before = lineage_keys(parse_config(values))
    (model / "weights").write_text("two!")
    assert all(lineage_keys(parse_config(values))[stage] != before[stage] for stage in STAGES)


FUNCTION = """
def reward(completions):
    return [{factor} * len(c) for c in completions]
"""
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


@pytest.mark.parametrize("body", [FUNCTION, OBJECT, PARTIAL], ids=["function", "object", "partial"])
def test_whatever_can_be_called_is_a_reward_of_which_a_changed_line_trains_again(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    sys.modules.pop("called_rewards", None)
    module = tmp_path / "called_rewards.py"
    module.write_text(body.format(factor=-1))
    monkeypatch.syspath_prepend(tmp_path)
    values["rewards"] = [{"function": "called_rewards:reward"}]
    before = lineage_keys(parse_config(values))
    module.write_text(body.format(factor=-2))
    after = lineage_keys(parse_config(values))
    assert [stage for stage in STAGES if after[stage] != before[stage]] == STAGES


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the work of each stage was done."""
    counts: Counter[str] = Counter()

    def counted(name: str, work: Any) -> Any:
        def do_work(context: Any) -> Values:
            counts[name] += 1
            return work(context)

        return do_work

    for name, work in list(WORK.items()):
        monkeypatch.setitem(WORK, name, counted(name, work))
    return counts


def arm(run: Path, values: Values, name: str, sweep: str | None = "sums.sweep", **sections: Any) -> Path:
    folder = run.parent / name
    folder.mkdir()
    registry = {"sweep": sweep} if sweep else {}
    configure(folder, {**values, "name": name, "registry": registry, **sections})
    for stage in table.STAGES:
        do(stage, folder)
    return folder


@pytest.mark.slow
def test_data_is_validated_once_in_a_sweep_and_planned_once_per_plan(
    run: Path, values: Values, made: Counter[str]
) -> None:
    first = arm(run, values, "sums.sweep.a")
    assert made == dict.fromkeys(WORK, 1), "runs outside the sweep give nothing to it"
    seeded = arm(run, values, "sums.sweep.b", seed=1)
    arm(run, values, "sums.sweep.c", train={**values["train"], "learning_rate": 0.5})
    assert made == {"validate": 1, "plan": 2, "train": 3, "evaluate": 3, "register": 3}
    receipt = VALIDATE.read_receipt(seeded)
    assert (receipt["taken_from"], receipt["num_prompts"]) == ("sums.sweep.a", {"train": 24, "eval": 16})
    assert (VALIDATE.path(seeded) / "train.parquet").read_bytes() == (
        VALIDATE.path(first) / "train.parquet"
    ).read_bytes()
    assert PLAN.read_receipt(seeded)["forecasts"] == PLAN.read_receipt(first)["forecasts"]
    assert all(found.is_up_to_date for found in conditions(seeded, read_config(seeded)).values())


def test_what_would_come_out_differently_is_made(run: Path, values: Values, made: Counter[str], tmp_path: Path) -> None:
    first = arm(run, values, "sums.sweep.a")
    arm(
        run,
        values,
        "sums.sweep.b",
        data={**values["data"], "train": str(write_sums(tmp_path / "more.parquet", 10, 36))},
    )
    arm(run, values, "other.a", sweep="other")
    arm(run, values, "sums.sweep-2.a", sweep="sums.sweep-2")
    arm(run, values, "sums.sweep.none", sweep=None)
    assert made["validate"] == made["plan"] == 5
    (VALIDATE.path(first) / "train.parquet").unlink()
    (run.parent / "sums.sweep.b").rename(run.parent / "elsewhere")
    (run.parent / "sums.sweep.none").rename(run.parent / "elsewhere-too")
    damaged = arm(run, values, "sums.sweep.d")
    assert made["validate"] == 6, "an output without its files is no output"
    assert do(VALIDATE, damaged, force=True), "made again, as asked"
    assert made["validate"] == 7


def test_a_sweep_has_a_folder_beside_the_runs(run: Path) -> None:
    assert sweep_folder("sums.sweep") == run.parents[1] / "sweeps" / "sums.sweep"
