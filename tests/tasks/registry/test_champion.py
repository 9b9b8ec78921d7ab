"""Promotion, refusal, force, rollback, by hand, two at once and killed in between, on a real MLflow database."""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Iterator
from itertools import count, pairwise
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from mlflow import MlflowClient, set_tracking_uri
from mlflow.store.model_registry.dbmodels.models import SqlRegisteredModelTag
from typer.testing import CliRunner

from flows.cli.main import app
from grpo_core.config.files import dump_config
from grpo_core.errors import ConfigError
from tasks.register import keep_record
from tasks.registry import champion as module
from tasks.registry.champion import PromotionError, identity, is_decided, promote, rollback
from tasks.stages.run_directory import storage_root
from tasks.tracking.runs import connect
from tests.evaluations import fixed_samples, promotion_config, register_version

NUM_PROMPTS = 40


@pytest.fixture(scope="module", autouse=True)
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_STORAGE", str(folder))
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.chdir(folder)  # artifacts of MLflow's default experiment are in the current folder
        patch.setattr(
            "flows.cli.promotion.configure", lambda: None
        )  # it sets the environment of all tests that come after
        yield
    set_tracking_uri(None)


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    return request.node.name.replace("/", "-")


def _samples(**right: int) -> pl.DataFrame:
    """Each policy gets this many of the first of NUM_PROMPTS prompts right."""
    return fixed_samples({policy: [1] * n + [0] * (NUM_PROMPTS - n) for policy, n in right.items()})


def _tags(model: str, version: str) -> dict[str, str]:
    tags = connect().get_model_version(model, version).tags
    return {key.removeprefix("promotion."): value for key, value in tags.items() if key.startswith("promotion.")}


def _champion(model: str) -> str | None:
    version = connect().get_registered_model(model).aliases.get("champion")
    return None if version is None else str(version)


def _history(model: str) -> list[tuple[str | None, str]]:
    history = json.loads(connect().get_registered_model(model).tags["champion.history"])
    return [(entry["version"], entry["how"]) for entry in history]


def _champions(model: str, count: int) -> None:
    """Versions 1 to `count`, each promoted, each better than the one before."""
    for version in range(1, count + 1):
        register_version(model, _samples(base=0, trained=8 * version))
        assert promote(model).decision == "promoted"


@pytest.mark.slow
def test_the_first_champion_has_beaten_the_base_and_the_next_one_the_first(model: str) -> None:
    _champions(model, 2)
    assert _champion(model) == "2"
    assert _history(model) == [("1", "promoted"), ("2", "promoted")]
    first, second = _tags(model, "1"), _tags(model, "2")
    assert (first["decision"], first["against"], float(first["gain"])) == ("promoted", "base", 8 / NUM_PROMPTS)
    assert (second["against"], second["metric"]) == ("1", "held-out/accuracy")
    assert float(second["p_value"]) == pytest.approx(2**-8, rel=1e-5)  # eight wins of eight
    assert second["reason"].startswith(
        "accuracy on held-out 40.0% against 20.0% of champion version 1, +20.0 points (95% "
    )
    assert promote(model).decision == "unchanged"
    assert (_tags(model, "2"), len(_history(model))) == (second, 2)


def test_a_refusal_leaves_the_champion_and_says_why(model: str) -> None:
    _champions(model, 1)
    version = register_version(model, _samples(base=0, trained=9))
    assert not is_decided(model, version)
    outcome = promote(model)
    assert (outcome.decision, outcome.version, outcome.against) == ("refused", "2", "1")
    assert "+2.5 points" in outcome.reason and "not shown to be better" in outcome.reason
    assert (_tags(model, "2")["decision"], _tags(model, "2")["reason"]) == ("refused", outcome.reason)
    assert is_decided(model, version)
    assert (_champion(model), _history(model)) == ("1", [("1", "promoted")])


@pytest.mark.slow
def test_each_further_attempt_against_a_champion_is_held_to_a_lower_level(model: str) -> None:
    _champions(model, 1)
    for attempt, right in enumerate((9, 10, 14), start=1):  # of 40; the champion has the first 8 right
        version = register_version(model, _samples(base=0, trained=right))
        outcome = promote(model)
        assert outcome.decision == "refused", "six wins of six are enough for a first attempt, not for a third"
        assert f"(attempt {attempt} against champion version 1, so at level " in outcome.reason
        assert _tags(model, version)["attempt"] == str(attempt)


@pytest.mark.slow
def test_the_count_against_a_champion_never_falls_whatever_becomes_of_its_rivals() -> None:
    model = "模" * 100 + "'\"\\"  # more bytes than a file's name may have, and what no filter of a search can quote
    client, by_reward = connect(), {"promotion": {"metric": "reward"}}
    _champions(model, 1)
    for right in (9, 10):  # of 40; the champion has the first 8 right
        register_version(model, _samples(base=0, trained=right))
        promote(model)
    for _ in range(2):
        assert "(attempt 2 against" in promote(model, "3").reason
        assert "(attempt 3 against" in promote(model, "3", changes=by_reward).reason
    client.delete_model_version_tag(model, "3", "record")
    assert "attempt" not in promote(model, "3").reason, "nothing to compare"
    client.delete_model_version(model, "3")
    register_version(model, _samples(base=0, trained=11))
    assert "(attempt 4 against champion version 1" in promote(model).reason
    assert promote(model, "2", force=True).decision == "forced"
    assert "(attempt 1 against champion version 2" in promote(model, "4").reason
    assert rollback(model) == ("2", "1")
    register_version(model, _samples(base=0, trained=12))
    assert "(attempt 5 against champion version 1" in promote(model).reason


@pytest.mark.slow
def test_force_promotes_and_the_mark_says_what_the_gate_said(model: str) -> None:
    _champions(model, 1)
    register_version(model, _samples(base=0, trained=4))
    refused = promote(model).reason
    assert promote(model, "2", force=True).decision == "forced"
    assert (_tags(model, "2")["decision"], _tags(model, "2")["reason"]) == ("forced", refused)
    assert _history(model) == [("1", "promoted"), ("2", "forced")]
    register_version(model, _samples(base=0, trained=30))
    assert promote(model, force=True).decision == "promoted"  # force is no mark where the gate agrees


def test_rules_are_those_recorded_and_a_changed_one_leaves_its_mark(model: str) -> None:
    strict = promotion_config(min_gain=0.5, guards=[{"metric": "kl", "max": 1}])
    register_version(model, _samples(base=0, trained=10), config=strict)
    assert ": better, but min_gain asks for 50.0 points (attempt 1 " in promote(model).reason
    assert "changes" not in _tags(model, "1")
    with pytest.raises(ConfigError, match=r"promotion.confidence = 2: Input should be less than 1"):
        promote(model, changes={"promotion": {"confidence": 2}})
    with pytest.raises(ConfigError, match=r"changes of train: .* only keys of promotion can differ here"):
        promote(model, changes={"train": {"max_steps": 1}})
    outcome = promote(model, changes={"promotion": {"min_gain": 0.1, "confidence": None}})
    assert outcome.decision == "promoted" and "guards kept: 1" in outcome.reason
    assert json.loads(_tags(model, "1")["changes"]) == {"min_gain": 0.1}


def test_a_candidate_is_paired_with_the_champion_that_is_there_now(model: str) -> None:
    """By its own evaluation where that had this champion beside it, else only on the same prompts and settings."""
    _champions(model, 1)
    beside = identity(connect().get_model_version(model, "1"))
    register_version(model, _samples(base=0, champion=39, trained=40), key="other", champion=beside)
    assert "100.0% against 97.5% of champion version 1" in promote(model).reason
    register_version(model, _samples(base=0, champion=0, trained=40), key="other", champion={**beside, "version": "7"})
    outcome = promote(model)
    assert outcome.decision == "refused"
    assert "not evaluated beside the champion version 1" in outcome.reason
    assert "`grpo stage evaluate --run simulated --force`" in outcome.reason
    assert "gain" not in _tags(model, "3")


def test_a_version_without_an_evaluation_is_refused_unless_forced(model: str) -> None:
    client = connect()
    client.create_registered_model(model)
    run = client.create_run("0")
    client.create_model_version(model, f"{run.info.artifact_uri}/model", run.info.run_id)
    outcome = promote(model, "1")
    assert outcome.decision == "refused"
    assert "no config.toml, evaluation/report.json, evaluation/samples.parquet in its MLflow run" in outcome.reason
    assert promote(model, "1", force=True).decision == "forced"
    register_version(model, _samples(base=0, trained=40))
    assert promote(model).decision == "refused"  # nothing is known of the champion either
    assert _tags(model, "2")["reason"].startswith("version 1 has no config.toml")


def test_what_cannot_be_tried_says_what_there_is(model: str) -> None:
    with pytest.raises(PromotionError, match=f"no registered model '{model}s' in MLflow; the nearest there: "):
        connect().create_registered_model(model)
        promote(f"{model}s")
    with pytest.raises(PromotionError, match="no registered model 'a/b' in MLflow"):
        promote("a/b")
    with pytest.raises(PromotionError, match=r"no version with the alias 'candidate' \(its aliases: none\)"):
        promote(model)
    with pytest.raises(PromotionError, match="has no version 3"):
        promote(model, "3")


@pytest.mark.parametrize("command", ["promote", "rollback"])
def test_a_command_for_a_model_that_is_not_there_answers_in_a_sentence(command: str) -> None:
    """Prefect would say it with tracebacks."""
    done = CliRunner().invoke(app, [command, "nobody"])
    assert done.exit_code == 2
    *_, sentence = done.output.splitlines()  # a new MLflow says before it that it makes its tables
    assert re.fullmatch("no registered model 'nobody' in MLflow; .*, and no run of this name has .*", sentence)


def test_a_promotion_takes_the_name_of_a_run_for_the_version_that_it_registered(model: str) -> None:
    """Refused before Prefect starts: the model is known by the run's receipt, its version 7 is not there."""
    register_version(model, _samples(base=0, trained=40))
    run = storage_root() / "runs" / "slower"
    run.mkdir(parents=True)
    (run / "registration.json").write_text(json.dumps({"model_name": model, "version": "7"}))
    assert CliRunner().invoke(app, ["promote", "slower"]).output == f"{model} has no version 7\n"
    assert CliRunner().invoke(app, ["promote", "slower", "--version", "8"]).output == f"{model} has no version 8\n"
    register_version("slower", _samples(base=0, trained=40))
    assert CliRunner().invoke(app, ["promote", "slower", "--version", "9"]).output == "slower has no version 9\n"


@pytest.mark.slow
def test_rollbacks_lead_back_through_the_champions(model: str) -> None:
    _champions(model, 3)
    assert rollback(model) == ("3", "2")
    assert _champion(model) == "2"
    assert _tags(model, "3")["rolled_back_to"] == "2"
    assert _tags(model, "3")["decision"] == "promoted"
    assert rollback(model) == ("2", "1")
    with pytest.raises(PromotionError, match="has had no champion before version 1"):
        rollback(model)
    assert promote(model, "3").decision == "promoted"
    assert "rolled_back_to" not in _tags(model, "3")
    assert rollback(model) == ("3", "1")
    assert [version for version, _ in _history(model)] == ["1", "2", "3", "2", "1", "3", "1"]


@pytest.mark.slow
def test_what_is_done_by_hand_in_mlflow_counts(model: str) -> None:
    _champions(model, 2)
    client = connect()
    client.set_registered_model_alias(model, "champion", "1")
    register_version(model, _samples(base=0, trained=16))
    assert promote(model).against == "1"  # of 16 prompts right, that 2 has right as well
    assert _history(model) == [("1", "promoted"), ("2", "promoted"), ("1", "by hand"), ("3", "promoted")]
    assert rollback(model) == ("3", "1")
    assert rollback(model) == ("1", "2")
    client.delete_registered_model_alias(model, "champion")
    register_version(model, _samples(base=0, trained=8))
    outcome = promote(model)
    assert outcome.against == "base"
    assert outcome.reason.endswith("there is no champion: version 2, the last one, lost the alias")
    client.delete_model_version(model, "2")
    assert rollback(model) == ("4", "1")  # the one before that still exists


def test_the_reason_says_that_the_champion_was_deleted(model: str) -> None:
    _champions(model, 2)
    connect().delete_model_version(model, "2")
    register_version(model, _samples(base=0, trained=5))
    reason = promote(model).reason
    assert reason.endswith("; there is no champion: version 2, the last one, was deleted")
    assert _tags(model, "3")["reason"] == reason


def test_another_model_that_had_the_name_before_is_not_the_champion(model: str) -> None:
    """Version numbers begin at 1 again, and MLflow has no other number for a version."""
    _champions(model, 1)
    former = identity(connect().get_model_version(model, "1"))
    connect().delete_registered_model(model)
    register_version(model, _samples(base=0, trained=39))
    assert promote(model).decision == "promoted"
    register_version(model, _samples(base=0, champion=0, trained=20), key="other", champion=former)
    outcome = promote(model)
    assert outcome.decision == "refused"
    assert "not evaluated beside the champion version 1" in outcome.reason


def test_a_version_is_judged_by_its_own_record_though_its_training_was_registered_again(
    model: str, tmp_path: Path
) -> None:
    client = connect()
    run_id = client.create_run("0").info.run_id
    client.create_registered_model(model)
    (tmp_path / "evaluation").mkdir()
    for min_gain, right in ((0.9, 10), (0.0, 30)):
        (tmp_path / "config.toml").write_text(dump_config(promotion_config(min_gain=min_gain)))
        report = {"key": "same", "champion": None, "made": f"{right}"}
        (tmp_path / "evaluation" / "report.json").write_text(json.dumps(report))
        _samples(base=0, trained=right).write_parquet(tmp_path / "evaluation" / "samples.parquet")
        tags = {"record": keep_record(client, run_id, tmp_path, key="same")}
        client.create_model_version(model, str(tmp_path), run_id, tags)
    refused = promote(model, "1")
    assert (refused.decision, "better, but min_gain asks for 90.0 points" in refused.reason) == ("refused", True)
    assert refused.reason.startswith("accuracy on held-out 25.0% against 0.0%")
    assert promote(model, "2").decision == "promoted"


class _Killed(BaseException):
    pass


class _Dying:
    """A client whose process is killed before its write number `writes`, counted from 0."""

    def __init__(self, client: MlflowClient, writes: int):
        self.client, self.left = client, writes

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("set_", "delete_")):
            if self.left == 0:
                raise _Killed
            self.left -= 1
        return getattr(self.client, name)


def _is_killed(action: Any, model: str, writes: int) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "connect", lambda: _Dying(connect(), writes))
        try:
            action(model)
        except _Killed:
            return True
    return False


@pytest.mark.slow
def test_a_promotion_and_a_rollback_that_are_killed_at_any_write_are_finished_by_the_next_one(model: str) -> None:
    _champions(model, 2)
    expected = {key: value for key, value in _tags(model, "2").items() if key != "at"}
    rollback(model)
    for writes in count():
        before = _history(model)
        is_promotion_killed = _is_killed(promote, model, writes)
        # Until it is done, the pipeline's retry tries again. Before the first write to the version, which follows the
        # one that counts the attempt, the decision is the one before.
        assert is_decided(model, "2") == (writes < 2 or not is_promotion_killed)
        if is_promotion_killed:
            assert promote(model).decision == "promoted"
        assert promote(model).decision == "unchanged"
        tags = _tags(model, "2")
        assert tags.pop("at")
        assert tags == expected
        assert (_champion(model), _history(model)) == ("2", [*before, ("2", "promoted")])

        is_rollback_killed = _is_killed(rollback, model, writes)
        if is_rollback_killed:
            assert rollback(model) == ("2", "1")
        tags = _tags(model, "2")
        assert tags.pop("at") and tags.pop("rolled_back_at")
        assert tags == {**expected, "rolled_back_to": "1"}
        assert (_champion(model), _history(model)) == ("1", [*before, ("2", "promoted"), ("1", "rolled back")])
        if not is_promotion_killed and not is_rollback_killed:
            break
    assert writes > 10


@pytest.mark.slow
def test_a_rollback_of_a_promotion_that_was_killed_is_not_undone_by_the_pipeline(model: str) -> None:
    _champions(model, 2)
    rollback(model)
    killed = next(writes for writes in count() if _is_killed(promote, model, writes) and _champion(model) == "2")
    assert killed > 0 and not is_decided(model, "2")
    assert rollback(model) == ("2", "1")
    assert is_decided(model, "2"), "a pipeline tries only what is not decided"


@pytest.mark.slow
@pytest.mark.parametrize("writes", [1, 2, 3])
def test_a_promotion_that_follows_a_killed_rollback_knows_it_as_one(model: str, writes: int) -> None:
    _champions(model, 2)
    assert _is_killed(rollback, model, writes)
    present = _champion(model)
    register_version(model, _samples(base=0, trained=30))
    assert promote(model).against == present
    rolled_back = [] if present == "2" else [("1", "rolled back")]
    assert _history(model) == [("1", "promoted"), ("2", "promoted"), *rolled_back, ("3", "promoted")]


@pytest.mark.slow
def test_a_champion_that_another_machine_sets_meanwhile_is_left_alone(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _champions(model, 2)
    judge = module._judge

    def other_machine(*arguments: Any) -> Any:
        verdict = judge(*arguments)
        connect().set_registered_model_alias(model, "champion", "1")
        return verdict

    register_version(model, _samples(base=0, trained=40))
    monkeypatch.setattr(module, "_judge", other_machine)
    with pytest.raises(PromotionError, match=r"was version 2 when this began and is version 1 now.*start this again"):
        promote(model)
    assert (_champion(model), "decision" in _tags(model, "3"), is_decided(model, "3")) == ("1", False, False)
    monkeypatch.setattr(module, "_judge", judge)
    assert promote(model).against == "1"


@pytest.mark.slow
def test_a_history_that_is_too_long_for_its_column_is_cut_by_the_next_promotion(model: str) -> None:
    """SQLite takes any length, PostgreSQL none above the column's; a database may be moved from one to the other."""
    _champions(model, 2)
    entry = {"how": "promoted", "at": "2026-01-01T00:00:00+00:00"}
    history = [{"version": version, **entry} for version in (*["1", "2"] * 200, "1", "2")]
    connect().set_registered_model_tag(model, "champion.history", json.dumps(history))
    register_version(model, _samples(base=0, trained=30))
    assert promote(model).decision == "promoted"
    tag = connect().get_registered_model(model).tags["champion.history"]
    assert len(tag) <= SqlRegisteredModelTag.__table__.c.value.type.length
    assert rollback(model) == ("3", "2")


def _promote_at_once(barrier: Barrier, versions: list[tuple[str, str]]) -> None:
    connect().search_registered_models()  # everything is imported and connected
    for model, version in versions:
        barrier.wait(timeout=300)
        promote(model, version)


@pytest.mark.slow
def test_of_two_at_once_the_second_meets_the_first_as_champion() -> None:
    races = {f"race-{right[0]}-{right[1]}": right for right in [(16, 16), (16, 30)]}
    candidates: dict[str, list[str]] = {}
    for model, right in races.items():
        _champions(model, 1)
        candidates[model] = [register_version(model, _samples(base=0, trained=count)) for count in right]
    context: Any = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    racers = [
        context.Process(target=_promote_at_once, args=(barrier, [(model, candidates[model][place]) for model in races]))
        for place in range(2)
    ]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(timeout=300)
    assert [racer.exitcode for racer in racers] == [0, 0]
    for model, right in races.items():
        history = [version for version, _ in _history(model)]
        assert history[-1] == _champion(model)
        for before, champion in pairwise(history):
            tags = _tags(model, champion)
            assert (tags["decision"], tags["against"]) == ("promoted", before)
        for version in set(candidates[model]) - set(history):
            tags = _tags(model, version)
            assert (tags["decision"], tags["against"]) == ("refused", history[-1])
        assert right[candidates[model].index(history[-1])] == max(right)
