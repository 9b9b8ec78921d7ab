"""The stages plan and probe: what no GPU should be waited for, which runs have a probe, when it is done again, and what
it says."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_core.config.files import load_config, parse_config
from grpo_core.data.curriculum import PassRates, write_rates
from grpo_core.errors import ConfigError
from grpo_core.fingerprint import content_hash
from grpo_core.planning.hardware import named_gpu
from grpo_core.planning.plan import make_plan, plan_inputs
from grpo_core.run_files import PASS_RATES, PROBED
from tasks import plan as stage
from tasks.plan import _first_epoch
from tasks.probe import histogram, sentences
from tasks.stages.condition import conditions, refuse_outdated_inputs
from tasks.stages.errors import StageError
from tasks.stages.lineage import lineage_keys
from tasks.stages.run import Context
from tasks.stages.table import PLAN, PROBE, STAGES, TRAIN, VALIDATE, Stage, stages_of
from tests.conftest import config_values, make_run, with_keys, write_config, write_sums
from tests.grpo_core.planning.test_forecast import PACE
from tests.grpo_core.training.training import trained_run
from tests.qwen import QWEN
from tests.tasks.stages import small_stages
from tests.tasks.stages.small_stages import configure, do


def _validated(run: Path, num_prompts: int) -> None:
    numbers = {"train": num_prompts, "eval": 16}
    parts = {name: {"num_prompts": number} for name, number in numbers.items()}
    receipt = {"num_prompts": numbers, "parts": parts, "lengths": {"train": {"mean": 5.0, "max": 6}}}
    (run / "dataset" / "report.json").write_text(json.dumps(receipt))


def test_the_plan_that_a_training_reads_has_the_tokens_that_fit_the_gpu(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And no number of a CPU's, or of a GPU elsewhere whose memory is not known, which is said."""
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_text(json.dumps(QWEN["1.5B"]))
    keys = {"name_or_path": str(tmp_path / "shape"), "max_completion_length": 512, "per_device_train_batch_size": 1024}
    run = make_run(tmp_path / "run", config_values(model_folder, tmp_path, **keys, mixed_precision="bf16"), 1000)
    _validated(run, 1000)
    monkeypatch.setenv("GRPO_MEASURE", "0")
    monkeypatch.setattr(stage, "get_run_logger", lambda: logging.getLogger("plan"))
    monkeypatch.setattr(stage, "show_table", lambda *_: None)
    monkeypatch.setattr(stage, "earlier_throughput", lambda *_: None)

    def planned() -> tuple[int | None, int | None]:
        made = stage._work(Context(load_config(run / "config.toml"), run, run / "plan.json.partial"))
        return made["plan"]["max_tokens_per_pass"], made["forecasts"].get("memory", {}).get("tokens_per_pass")

    monkeypatch.setattr(stage, "find_gpu", lambda: named_gpu("H100"))
    chosen, told = planned()
    assert chosen == told and 10_000 < (chosen or 0) < 1024 * 518
    monkeypatch.setattr(stage, "find_gpu", lambda: None)
    assert planned() == (None, None)
    assert "is not known" not in caplog.text
    monkeypatch.setenv("GRPO_GPU_DEPLOYMENT", "pool")
    assert planned()[0] is None
    assert "the memory of GPU of train/pool is not known: the plan neither says whether the run fits" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "first", "message"),
    [
        ({"max_steps": 3}, 10, "has 2 generation batches, and the plan takes 3: set train.max_steps to 2 or less"),
        ({"max_steps": 2}, 11, r"has another prompt in row \d+ than data.train="),
    ],
    ids=["too short", "of other prompts"],
)
def test_a_recording_that_the_training_could_not_take_is_refused(
    model_folder: Path, tmp_path: Path, keys: dict[str, Any], first: int, message: str
) -> None:
    values = config_values(model_folder, tmp_path)
    recorded = trained_run(tmp_path / "recorded", values, max_steps=2)
    run = make_run(tmp_path / "run", with_keys(values, engine="recorded", recording=str(recorded), **keys))
    write_sums(run / "dataset" / "train.parquet", first, first + 24)
    _validated(run, 24)
    with pytest.raises(ConfigError, match=message):
        stage._work(Context(load_config(run / "config.toml"), run, run / "plan.json.partial"))


def test_a_probe_of_an_earlier_version_keeps_its_identity_and_is_no_start_for_a_warm_start(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kept the rates alone. No run that has one is done again; the plan names the command for its completions. With
    these, their warm start is in the plan's wall time."""
    values = {**config_values(model_folder, tmp_path), "warm_start": {"demonstrations": "probe"}}
    run = make_run(tmp_path / "run", _with(values, probe=4))
    _validated(run, 24)
    (run / "probe").mkdir()
    write_rates(PassRates(np.ones(24), np.full(24, 2), np.zeros(24, int)), run / "probe" / PASS_RATES)
    PROBE.receipt_path(run).write_text('{"scored": 2}')
    assert PROBE.content and PROBE.content(run / "probe", {"scored": 2}) == content_hash(
        str(run / "probe" / PASS_RATES)
    )
    monkeypatch.setenv("GRPO_MEASURE", "0")
    monkeypatch.setattr(stage, "get_run_logger", lambda: logging.getLogger("plan"))
    monkeypatch.setattr(stage, "earlier_throughput", lambda *_: None)
    monkeypatch.setattr(stage, "show_table", lambda *_: None)
    monkeypatch.setattr(stage, "measured_pace", lambda *_: PACE)
    context = Context(load_config(run / "config.toml"), run, run / "plan.json.partial")
    with pytest.raises(StageError, match=r"kept no completions .*first run: grpo stage probe --run run --force"):
        stage._work(context)
    sizes = {"rows": 16, "longest": 8, "longest_completion": 3, "mean": 8.0}
    PROBE.receipt_path(run).write_text(json.dumps({"demonstrations": sizes}))
    assert "warm-start" in stage._work(context)["forecasts"]["time"]["parts_hours"]


@pytest.mark.slow
def test_the_plan_refuses_a_model_that_the_training_would_refuse(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is known of its pace."""
    run = make_run(tmp_path / "run", with_keys(config_values(model_folder, tmp_path), routing_replay=True))
    _validated(run, 24)
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path / "storage"))
    monkeypatch.delenv("GRPO_MEASURE")
    monkeypatch.setattr(stage, "get_run_logger", lambda: logging.getLogger("plan"))
    with pytest.raises(StageError, match="Qwen2ForCausalLM has no routers that transformers names: remove routing_rep"):
        stage._work(Context(load_config(run / "config.toml"), run, run / "plan.json.partial"))


def test_keys_of_mixtures_belong_to_a_plan_and_change_none_without_them(values: dict[str, Any]) -> None:
    plain = lineage_keys(parse_config(values))
    assert lineage_keys(parse_config(with_keys(values, router_aux_loss_coef=0.0, routing_replay=False))) == plain
    for key in ({"router_aux_loss_coef": 0.1}, {"routing_replay": True}):
        assert lineage_keys(parse_config(with_keys(values, **key)))["plan"] != plain["plan"]


@pytest.fixture
def values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr("tasks.stages.run.get_run_logger", lambda: logging.getLogger("test"))  # there is no flow run
    write_config(tmp_path)
    (tmp_path / "model" / "config.json").write_text("{}")
    return config_values(tmp_path / "model", tmp_path)


def _with(values: dict[str, Any], **curriculum: Any) -> dict[str, Any]:
    return {**values, "data": {**values["data"], "curriculum": curriculum}}


def _probe(context: Context) -> dict[str, Any]:
    write_rates(PassRates(np.ones(2), np.full(2, 2), np.zeros(2, int)), context.partial / PASS_RATES)
    return {"scored": 2, "never": 0, "always": 0}


def _pipeline(run: Path, values: dict[str, Any]) -> list[str]:
    """The stages that are executed."""
    configure(run, values)
    work = {**small_stages.WORK, "probe": _probe}
    return [stage.name for stage in stages_of(parse_config(values)) if do(stage, run, work=work[stage.name])]


def _refuse(stage: Stage, run: Path, values: dict[str, Any]) -> None:
    config = parse_config(values)
    refuse_outdated_inputs(stage, run, config, conditions(run, config))


def test_a_run_has_a_probe_if_it_asks_for_one(values: dict[str, Any], tmp_path: Path) -> None:
    assert stages_of(parse_config(values)) == STAGES
    names = [stage.name for stage in stages_of(parse_config(_with(values, probe=4)))]
    assert names == ["validate", "probe", "plan", "train", "evaluate", "register"]
    (run := tmp_path / "run").mkdir()
    with pytest.raises(StageError, match=r"has no stage probe: data.curriculum.probe is not set .* --set data.curr"):
        _refuse(PROBE, run, values)
    with pytest.raises(StageError, match=r"it cannot be set either: data.curriculum.probe=4 goes by pass rates"):
        _refuse(PROBE, run, {**values, "rewards": [{"function": "char_length"}]})
    recorded = with_keys(values, engine="recorded", recording=str(run))
    with pytest.raises(StageError, match=r"(?s)it cannot be set either: .*engine='recorded'.*remove data.curriculum"):
        _refuse(PROBE, run, recorded)
    with pytest.raises(StageError, match=r"(?s)stage validate --run run .*stage probe --run run .*stage plan"):
        _refuse(TRAIN, run, _with(values, probe=4))


@pytest.mark.slow
def test_a_probe_is_done_again_only_for_what_its_rates_follow_from(values: dict[str, Any], tmp_path: Path) -> None:
    (run := tmp_path / "run").mkdir()
    asked = _with(values, kind="variance", probe=4)
    assert _pipeline(run, asked) == ["validate", "probe", "plan", "train", "evaluate", "register"]
    assert _pipeline(run, asked) == []
    later = ["plan", "train", "evaluate", "register"]
    assert _pipeline(run, _with(values, kind="easy_to_hard", probe=4)) == later
    assert _pipeline(run, with_keys(asked, learning_rate=1e-3)) == later
    assert _pipeline(run, with_keys(asked, temperature=0.7)) == ["probe", *later]
    assert _pipeline(run, _with(with_keys(values, temperature=0.7), kind="variance", probe=5)) == ["probe", *later]
    write_sums(tmp_path / "train.parquet", 10, 30)
    assert _pipeline(run, with_keys(asked, temperature=0.7))[:2] == ["validate", "probe"]


@pytest.mark.slow
def test_a_training_is_up_to_date_when_a_probe_is_added_that_it_does_not_use(
    values: dict[str, Any], tmp_path: Path
) -> None:
    (run := tmp_path / "run").mkdir()
    assert _pipeline(run, values) == [stage.name for stage in STAGES]
    assert _pipeline(run, _with(values, probe=4)) == ["probe", "plan"]
    assert _pipeline(run, _with(with_keys(values, temperature=0.7), probe=4))[:3] == ["probe", "plan", "train"]
    used = _with(with_keys(values, temperature=0.7), kind="variance", probe=4)
    assert _pipeline(run, used) == ["plan", "train", "evaluate", "register"]
    assert TRAIN.inputs(parse_config(used)) == (VALIDATE, PROBE, PLAN)
    assert TRAIN.inputs(parse_config(_with(values, probe=4))) == (VALIDATE, PLAN)


def test_keys_of_a_curriculum_change_no_lineage_of_a_run_without_one(values: dict[str, Any]) -> None:
    plain, other = (lineage_keys(parse_config(each)) for each in (values, _with(values, kind="variance")))
    assert plain == lineage_keys(parse_config(_with(values, kind="none")))
    assert [stage for stage in plain if plain[stage] != other[stage]] == ["plan", "train", "evaluate", "register"]
    values["rewards"][0]["range"] = [0, 1]
    assert lineage_keys(parse_config(values))["train"] == plain["train"]
    assert lineage_keys(parse_config(_with(values, kind="variance")))["train"] != other["train"]


def test_a_plan_goes_by_the_rates_of_what_the_first_epoch_takes(values: dict[str, Any], tmp_path: Path) -> None:
    config = parse_config(_with(values, kind="band", band=[0.1, 0.9], probe=4))
    passed = np.array([0, 2, 3, 4] * 6)
    (tmp_path / "probe").mkdir()
    write_rates(PassRates(passed.astype(float), np.full(24, 4), np.zeros(24, int)), tmp_path / PROBED)
    rates, said = _first_epoch(config, make_plan(plan_inputs(config, 24)), tmp_path)
    assert {*rates} == {0.5, 0.75} and len(rates) == 24
    assert said == "12 of 24 prompts, mean pass rate 62%; 6 have a pass rate below 0.1, 6 above 0.9"
    assert _first_epoch(parse_config(values), make_plan(plan_inputs(config, 24)), tmp_path) == ([], "")


def test_what_a_probe_found_is_said_in_words_and_tenths() -> None:
    report = {"prompts": 10, "scored": 8, "never": 2, "always": 1, "mean": 0.4375}
    report |= {"histogram": [2, 0, 1, 0, 1, 2, 0, 1, 0, 1]}
    first, missing, advice = sentences(report, 4)
    assert first == (
        "Of 8 prompts with 4 completions each, the base model never solves 2 (25%) and always solves 1 (12%); the mean "
        "pass rate is 44%."
    )
    assert missing.startswith("2 prompts have no rate")
    assert "data.curriculum.kind" in advice
    head, *rows = histogram(report)
    assert head == ["pass rate", "prompts", ""]
    assert rows[0] == ["0% to 10%", "2", "█" * 40] and rows[2] == ["20% to 30%", "1", "█" * 20]
    (only,) = sentences({"prompts": 3, "scored": 0, "never": 0, "always": 0, "mean": None}, 4)
    assert "no pass rates" in only
