"""The stage warm-start: which demonstrations validate and the plan refuse, and what is done again when something
changes."""

from __future__ import annotations

import json
import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from flows.parameters.describe_plan import describe_plan
from flows.parameters.early_refusals import refuse_early
from grpo_core.config.files import parse_config
from grpo_core.config.warm_start import supervised
from grpo_core.data.curriculum import PassRates, write_rates
from grpo_core.errors import ConfigError, GrpoError
from grpo_core.planning.hardware import named_gpu
from grpo_core.planning.warm_start import Sizes, describe_warm_start
from tasks import screen
from tasks.data.demonstrations import _key, write_demonstrations
from tasks.data.sources import SourceError
from tasks.stages.condition import conditions, refuse_outdated_inputs
from tasks.stages.errors import StageError
from tasks.stages.lineage import lineage_keys
from tasks.stages.run import Context
from tasks.stages.table import PROBE, WARM_START, stages_of
from tests.conftest import config_values, make_tokenizer, with_keys, write_data
from tests.grpo_core.planning.test_forecast import PACE
from tests.qwen import QWEN
from tests.rows import write_lines
from tests.tasks.stages import small_stages
from tests.tasks.stages.small_stages import configure, do

SHOWN = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(10, 14)]


@pytest.fixture
def values(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr("tasks.stages.run.get_run_logger", lambda: logging.getLogger("test"))  # there is no flow run
    write_data(tmp_path)
    write_lines(tmp_path / "shown.jsonl", SHOWN)
    return _with(config_values(model_folder, tmp_path), demonstrations=str(tmp_path / "shown.jsonl"), batch_size=2)


def _with(values: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {**values, "warm_start": {**values.get("warm_start", {}), **keys}}


def _written(values: dict[str, Any], path: Path) -> dict[str, Any]:
    config = parse_config(values)
    held_out = {"eval": screen.screen(config).kept["eval"]}
    return write_demonstrations(config, lambda row: [], held_out, path)


def test_demonstrations_are_written_as_the_tokens_that_the_policy_would_sample(
    values: dict[str, Any], tmp_path: Path
) -> None:
    found = _written(values, tmp_path / "found.parquet")
    assert found == {"rows": 4, "dropped": 0, "longest": 8, "longest_completion": 3, "mean": 8.0, "trained_tokens": 12}
    tokenizer = make_tokenizer()
    for row, shown in zip(pq.read_table(tmp_path / "found.parquet").to_pylist(), SHOWN, strict=True):
        assert tokenizer.decode(row["prompt_ids"]) == shown["prompt"]
        assert tokenizer.decode(row["completion_ids"]) == shown["completion"] + tokenizer.eos_token
        assert row["trained_tokens"] == [1, 1, 1]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "1+1=", "completion": "2" * 60}, "row 4: it has 65 tokens, and the model takes 64"),
        (
            {"prompt": "xyz", "completion": "2"},
            "row 4: the tokenizer turns its prompt, or what the assistant says, into",
        ),
        ({"prompt": "1+1=", "completion": ""}, "row 4: it has no text in the column `messages`, or `prompt` and"),
        (None, "row 4: its prompt is a held-out one, on which the run is evaluated"),
    ],
    ids=["long", "unknown", "empty", "held out"],
)
def test_a_row_that_cannot_be_learnt_from_is_refused_by_its_number(
    values: dict[str, Any], tmp_path: Path, row: dict[str, str] | None, said: str
) -> None:
    shown = _with(values, demonstrations=str(tmp_path / "more.jsonl"))
    prompt = pq.read_table(tmp_path / "eval.parquet")["prompt"][3].as_py()
    write_lines(tmp_path / "more.jsonl", [*SHOWN, row or {"prompt": prompt, "completion": "1"}])
    with pytest.raises(SourceError, match=re.escape(said)) as refused:
        _written(shown, tmp_path / "found.parquet")
    assert "1 of 5 rows cannot be learnt from" in str(refused.value)
    if row is None:
        for severity, kept in (("drop", 4), ("warn", 5)):
            shown["data"] = {**shown["data"], "checks": {"near_overlap": severity}}
            assert _written(shown, tmp_path / "found.parquet")["rows"] == kept


def test_a_held_out_prompt_is_known_in_each_of_its_forms() -> None:
    call = {"name": "add", "arguments": {"a": 1}}
    user, system = {"role": "user", "content": "How much is 1+1?"}, {"role": "system", "content": "Be brief."}
    parts = {**user, "content": [{"type": "text", "text": "how much"}, {"type": "text", "text": " is 1+1?"}]}
    assert len({_key(each) for each in ("How much is 1+1?", [user], [system, user], [parts])}) == 1
    said = [user, {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]}]
    as_json = {**call, "arguments": '{"a": 1}'}
    written = [user, {"role": "assistant", "tool_calls": [{"type": "function", "function": as_json}]}]
    assert _key(said) == _key(written) != _key([user])
    assert _key([system]) != _key([{**system, "content": "Be long."}])


def test_the_plan_refuses_what_the_stage_would_and_says_what_it_takes(values: dict[str, Any], tmp_path: Path) -> None:
    refuse_early(parse_config(values))
    few, other = _with(values, batch_size=5), _with(values, demonstrations=str(tmp_path / "train.parquet"))
    gone = _with(values, demonstrations="gone.jsonl")
    for refused, said in (
        (few, r"batch_size=5 with 4 demonstrations in .*: they do not fill one update"),
        (other, r"has the columns .*: demonstrations need the column `messages`"),
        (gone, r"warm_start.demonstrations = 'gone.jsonl': no such file"),
    ):
        with pytest.raises(GrpoError, match=said):
            refuse_early(parse_config(refused))
    for broken, said in (
        (with_keys(values, num_processes=4, num_generations=2), "not a multiple of train.num_processes=4, .* to 4"),
        ({**values, "warm_start": {"batch_size": 2}}, "batch_size=2 is for a warm start; set demonstrations"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse_config(broken)
    said = "warm start: 2 updates of 2 demonstrations before the training"
    assert describe_warm_start(parse_config(values), 4, None, None) == (said, None)
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "config.json").write_text(json.dumps(QWEN["1.5B"]))
    shaped = with_keys(values, name_or_path=str(tmp_path / "qwen"), mixed_precision="bf16")
    text, _ = describe_warm_start(parse_config(shaped), 1000, Sizes(1000, 300, 200, 250.0), named_gpu("H100"))
    assert re.fullmatch(r"warm start: 500 .*, about 250,000 tokens, [\d.]+ GiB per GPU.*", text)


def _validate(context: Context) -> dict[str, Any]:
    receipt = small_stages.validate(context)
    shown = Path(context.config.warm_start.demonstrations or "")
    (context.partial / "demonstrations.parquet").write_bytes(shown.read_bytes())
    return receipt | {"demonstrations": {}}


def _probe(context: Context, completions: int = 4) -> dict[str, Any]:
    """A probe whose number of right completions is that of completions."""
    write_rates(PassRates(np.ones(2), np.full(2, 2), np.zeros(2, int)), context.partial / "pass_rates.parquet")
    (context.partial / "demonstrations.parquet").write_text(str(completions))
    return {"scored": 2, "never": 0, "always": 0, "demonstrations": {}}


def _warm_start(context: Context) -> dict[str, Any]:
    (context.partial / "model").mkdir()
    (context.partial / "model" / "weights").write_text(str(context.config.warm_start))
    if context.config.model.use_peft:
        (context.partial / "adapter").mkdir()
    return {"counted": {"updates": 2}, "metrics": {"loss": 1.0}}


def _pipeline(run: Path, values: dict[str, Any]) -> list[str]:
    """The stages that are executed."""
    configure(run, values)
    shows = {"validate": _validate, "warm-start": _warm_start} if "warm_start" in values else {}
    work = {**small_stages.WORK, **shows}
    return [stage.name for stage in stages_of(parse_config(values)) if do(stage, run, work=work[stage.name])]


@pytest.mark.slow
def test_a_warm_start_is_done_again_only_for_what_its_model_follows_from(
    values: dict[str, Any], tmp_path: Path
) -> None:
    (run := tmp_path / "run").mkdir()
    later = ["train", "evaluate", "register"]
    assert _pipeline(run, values) == ["validate", "plan", "warm-start", *later]
    assert _pipeline(run, values) == []
    assert _pipeline(run, with_keys(values, learning_rate=1e-3)) == ["plan", *later]
    values = with_keys(values, learning_rate=1e-3)
    assert _pipeline(run, {**values, "rewards": [{"function": "char_length"}]}) == ["validate", "plan", *later]
    values = {**values, "rewards": [{"function": "char_length"}]}
    assert _pipeline(run, _with(values, learning_rate=1e-3)) == ["plan", "warm-start", *later]
    write_lines(tmp_path / "shown.jsonl", SHOWN[:3])
    assert _pipeline(run, _with(values, learning_rate=1e-3))[:3] == ["validate", "plan", "warm-start"]
    without = {name: section for name, section in values.items() if name != "warm_start"}
    assert _pipeline(run, without) == ["validate", "plan", *later]
    with pytest.raises(StageError, match=r"no stage warm-start: warm_start.demonstrations is not set .* --set warm_st"):
        refuse_outdated_inputs(WARM_START, run, parse_config(without), conditions(run, parse_config(without)))


@pytest.mark.slow
def test_a_warm_start_of_an_adapter_is_done_again_without_what_the_training_loads_of_it(
    values: dict[str, Any], tmp_path: Path
) -> None:
    (run := tmp_path / "run").mkdir()
    lora = with_keys(values, use_peft=True)
    assert "warm-start" in _pipeline(run, values) and "warm-start" in _pipeline(run, lora)
    assert _pipeline(run, lora) == []
    (run / "warm-start" / "adapter").rmdir()
    assert conditions(run, parse_config(lora))["warm-start"].reason == "adapter is gone"
    assert _pipeline(run, lora) == ["warm-start"], "the same model"


def _from_probe(values: dict[str, Any], number: int = 4, **keys: Any) -> dict[str, Any]:
    asked = {**values["data"], "curriculum": {"probe": number}}
    return _with({**values, "data": asked}, demonstrations="probe", **keys)


@pytest.mark.slow
def test_a_warm_start_from_the_probe_is_done_again_when_the_probe_gives_other_completions(
    values: dict[str, Any], tmp_path: Path
) -> None:
    def pipeline(values: dict[str, Any], said: int = 4) -> list[str]:
        configure(run, values)
        work = {**small_stages.WORK, "probe": partial(_probe, completions=said), "warm-start": _warm_start}
        return [stage.name for stage in stages_of(parse_config(values)) if do(stage, run, work=work[stage.name])]

    (run := tmp_path / "run").mkdir()
    shown, later = _from_probe(values), ["plan", "warm-start", "train", "evaluate", "register"]
    only_probed = {name: section for name, section in shown.items() if name != "warm_start"}
    assert pipeline(only_probed) == ["validate", "probe", "plan", "train", "evaluate", "register"]
    assert pipeline(shown) == later, "the probe has kept the completions"
    assert pipeline(shown) == []
    assert WARM_START.inputs(parse_config(shown)) == (PROBE,)
    assert pipeline(with_keys(shown, learning_rate=1e-3)) == ["plan", *later[2:]]
    shown = with_keys(shown, learning_rate=1e-3)
    assert pipeline(with_keys(shown, temperature=0.7)) == ["probe", *later]
    shown = with_keys(shown, temperature=0.7)
    do(PROBE, run, force=True, work=partial(_probe, completions=5))
    assert pipeline(shown) == later[:2], "this stage gives the same model"
    (run / "probe" / "demonstrations.parquet").unlink()
    assert pipeline(shown, 5) == ["probe"], "the same completions, put back"


def test_too_few_completions_for_a_warm_start_from_the_probe_are_refused_as_soon_as_they_are_known(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the configuration, by its most completions and, once the probe is there, by their number."""
    (model := tmp_path / "model").mkdir()
    values = with_keys(values, name_or_path=str(model))
    (model / "config.json").write_text(json.dumps(QWEN["1.5B"]))
    for broken, said in (
        (_from_probe(values, 0), "demonstrations='probe' with data.curriculum.probe=0: .* to 8, for instance"),
        (_from_probe(values, revision="main"), "revision='main' with demonstrations='probe'; remove it"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse_config(broken)
    with pytest.raises(ConfigError, match=r"96 right completions of the probe: .* raise data.curriculum.probe=4"):
        refuse_early(parse_config(_from_probe(values, batch_size=97)))
    config = parse_config(_from_probe(values, batch_size=8))
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))

    def planned(**keys: Any) -> str:
        return next(note for note in describe_plan(config, **keys)["notes"] if note.startswith("warm start"))

    assert planned() == "warm start: at most 12 updates of 8 demonstrations before the training"
    probed = {"rows": 16, "longest": 8, "longest_completion": 3, "mean": 8.0}
    receipt = tmp_path / "runs" / config.name / "probe" / "report.json"
    receipt.parent.mkdir(parents=True)
    for key, said in (("another", "at most 12 updates"), (lineage_keys(config)["probe"], "2 updates of 8 .* 128 tok")):
        receipt.write_text(json.dumps({"lineage_key": key, "demonstrations": probed}))
        assert re.match(f"warm start: {said}", planned())
        parts = describe_plan(config, measure=lambda *_: PACE)["forecasts"]["time"]["parts_hours"]
        assert ("warm-start" in parts) == (key != "another")
    receipt.write_text(json.dumps({"lineage_key": key, "demonstrations": {**probed, "rows": 7}}))
    with pytest.raises(ConfigError, match="batch_size=8 with 7 right completions of the probe"):
        describe_plan(config)
    # For another machine, whether the probe is up to date is not known: that would import the run's own modules.
    monkeypatch.setattr("flows.parameters.describe_plan.lineage_keys", None)
    assert planned(gpu="H200").startswith("warm start: at most 12 updates")


def test_the_plan_takes_the_sizes_of_demonstrations_that_have_not_changed_alone(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_config(values)
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    monkeypatch.setattr("flows.parameters.describe_plan.read_validated", lambda run: None)
    receipt = tmp_path / "runs" / config.name / "dataset" / "report.json"
    receipt.parent.mkdir(parents=True)
    written = {"rows": 8, "longest": 8, "longest_completion": 3, "mean": 8.0}
    for key, said in (("another", "2 updates"), (lineage_keys(config)["validate"], "4 updates of 2 .* 64 tokens")):
        receipt.write_text(json.dumps({"lineage_key": key, "demonstrations": written}))
        notes = describe_plan(config, measure=lambda *_: PACE)["notes"]
        assert re.match(f"warm start: {said}", next(note for note in notes if note.startswith("warm start")))


def test_low_entropy_breaks_no_limit_of_a_warm_start_and_other_limits_stay(values: dict[str, Any]) -> None:
    health = {"entropy_action": "stop", "not_finite_action": "roll_back", "max_roll_backs": 5}
    own = parse_config({**values, "health": health})
    assert supervised(own, 3).health == own.health.model_copy(update={"min_entropy": 0.0})


def test_a_run_without_a_warm_start_has_the_lineage_that_it_had(values: dict[str, Any]) -> None:
    without = {name: section for name, section in values.items() if name != "warm_start"}
    plain, warm = (lineage_keys(parse_config(each)) for each in (without, values))
    assert "warm-start" not in plain and "warm-start" in warm
    assert all(plain[name] != warm[name] for name in plain)
