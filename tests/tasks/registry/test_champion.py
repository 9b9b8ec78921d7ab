"""Promotion, refusal, force, rollback and changes by hand, on a real MLflow database."""

from __future__ import annotations

import json
import re
from pathlib import Path

import polars as pl
import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from grpo_core.config.files import dump_config
from grpo_core.errors import ConfigError
from tasks.register import keep_record
from tasks.registry.champion import PromotionError, is_decided, promote, rollback
from tasks.registry.judging import identity
from tasks.stages.run_directory import storage_root
from tasks.tracking.runs import connect
from tests.evaluations import promotion_config, register_version, simulated_samples
from tests.tasks.registry.champions import NUM_PROMPTS, champion_of, history_of, make_champions, samples_of, tags_of

pytestmark = pytest.mark.usefixtures("mlflow")


def refused(model: str, version: str = "candidate") -> str:
    """Why."""
    outcome = promote(model, version)
    assert outcome.decision == "refused"
    return outcome.reason


def test_the_first_champion_has_beaten_the_base_and_the_next_one_the_first(model: str) -> None:
    make_champions(model, 2)
    assert champion_of(model) == "2"
    assert history_of(model) == [("1", "promoted"), ("2", "promoted")]
    first, second = tags_of(model, "1"), tags_of(model, "2")
    assert (first["decision"], first["against"], float(first["gain"])) == ("promoted", "base", 8 / NUM_PROMPTS)
    assert (second["against"], second["metric"]) == ("1", "held-out/accuracy")
    assert float(second["p_value"]) == pytest.approx(2**-8, rel=1e-5)  # eight wins of eight
    assert second["reason"].startswith(
        "accuracy on held-out 40.0% against 20.0% of champion version 1, +20.0 points (95% "
    )
    assert promote(model).decision == "unchanged"
    assert (tags_of(model, "2"), len(history_of(model))) == (second, 2)


def test_a_refusal_leaves_the_champion_and_says_why(model: str) -> None:
    make_champions(model, 1)
    version = register_version(model, samples_of(base=0, trained=9))
    assert not is_decided(model, version)
    outcome = promote(model)
    assert (outcome.decision, outcome.version, outcome.against) == ("refused", "2", "1")
    assert "+2.5 points" in outcome.reason and "not shown to be better" in outcome.reason
    assert (tags_of(model, "2")["decision"], tags_of(model, "2")["reason"]) == ("refused", outcome.reason)
    assert is_decided(model, version)
    assert (champion_of(model), history_of(model)) == ("1", [("1", "promoted")])


def test_a_better_version_that_answers_otherwise_in_mlflow_is_refused(model: str) -> None:
    tags = {"served.compared": "50", "served.agreeing": "49"}
    version = register_version(model, samples_of(base=0, trained=20), tags=tags)
    assert "it answers 49 of 50 held-out prompts as in the evaluation" in refused(model, version)
    assert promote(model, version, changes={"promotion": {"served_agreement": 0.98}}).decision == "promoted"
    failed = register_version(model, samples_of(base=0, trained=40), tags={"served.failed": "no tokenizer"})
    assert "it failed: no tokenizer" in refused(model, failed)


def test_each_further_attempt_against_a_champion_is_held_to_a_lower_level(model: str) -> None:
    make_champions(model, 1)
    for attempt, right in enumerate((9, 10, 14), start=1):  # of 40; the champion has the first 8 right
        version = register_version(model, samples_of(base=0, trained=right))
        outcome = promote(model)
        assert outcome.decision == "refused", "six wins of six are enough for a first attempt, not for a third"
        assert f"(attempt {attempt} against champion version 1, " in outcome.reason
        assert tags_of(model, version)["attempt"] == str(attempt)


@pytest.mark.slow
def test_the_count_against_a_champion_never_falls_whatever_becomes_of_its_rivals() -> None:
    model = "模" * 100 + "'\"\\"  # more bytes than a file's name may have, and what no filter of a search can quote
    client, by_reward = connect(), {"promotion": {"metric": "reward"}}
    make_champions(model, 1)
    for right in (9, 10):  # of 40; the champion has the first 8 right
        register_version(model, samples_of(base=0, trained=right))
        promote(model)
    for _ in range(2):
        assert "(attempt 2 against" in promote(model, "3").reason
        assert "(attempt 3 against" in promote(model, "3", changes=by_reward).reason
    client.delete_model_version_tag(model, "3", "record")
    assert "attempt" not in promote(model, "3").reason, "nothing to compare"
    client.delete_model_version(model, "3")
    register_version(model, samples_of(base=0, trained=11))
    assert "(attempt 4 against champion version 1" in promote(model).reason
    assert promote(model, "2", force=True).decision == "forced"
    assert "(attempt 2 against champion version 2" in promote(model, "4").reason, "it and 1 were there before"
    assert rollback(model) == ("2", "1")
    register_version(model, samples_of(base=0, trained=12))
    assert "(attempt 5 against champion version 1" in promote(model).reason


@pytest.mark.slow
def test_versions_that_were_evaluated_but_never_tried_count_as_attempts_in_their_order(model: str) -> None:
    make_champions(model, 1)
    for right in (9, 10, 14):  # of 40; the champion has the first 8 right
        key = "another weight of a reward" if right == 9 else "same"
        register_version(model, samples_of(base=0, trained=right), key=key)
    other = samples_of(base=0, trained=9).with_columns(prompt=pl.lit("another ") + pl.col("prompt"))
    register_version(model, other)
    version = register_version(model, samples_of(base=0, trained=14))
    outcome = promote(model)
    assert outcome.decision == "refused", "six wins of six are enough for a first attempt, not for the best of four"
    assert outcome.reason.endswith(
        "(attempt 4 against champion version 1, with 3 versions evaluated on these prompts before it, so at level "
        "0.0025)"
    )
    assert promote(model, version).reason == outcome.reason
    assert "(attempt 2 against champion version 1, with 1 version evaluated" in promote(model, "3").reason
    assert promote(model, "4", force=True).decision == "forced"
    register_version(model, samples_of(base=0, trained=15))
    assert "(attempt 1 against champion version 4, so at level" in promote(model).reason, "as the others came before it"
    assert "(attempt 5 against champion version 4, with 3 versions" in promote(model, "6").reason, "it is one of them"


def test_versions_made_under_a_champion_that_was_named_by_hand_count(model: str) -> None:
    client = connect()
    register_version(model, samples_of(base=0, trained=8))
    client.set_registered_model_alias(model, "champion", "1")
    for right in (9, 9, 14):
        register_version(model, samples_of(base=0, trained=right))
    assert "(attempt 3 against champion version 1, with 2 versions" in promote(model).reason


@pytest.mark.slow
def test_of_a_sweep_the_chosen_arm_counts_and_all_of_them_if_another_one_is_tried(model: str) -> None:
    for arm in range(4):
        chosen = {"sweep.chosen": "rates"} if arm == 2 else {}
        register_version(model, samples_of(base=0, trained=1), tags={"sweep": "rates", **chosen})
    assert "(attempt 1 against the base model, so at" in promote(model, "3").reason, "chosen on other prompts"
    register_version(model, samples_of(base=0, trained=1))
    assert "(attempt 2 against the base model, with 1 version " in promote(model).reason
    by_hand = promote(model, "4").reason
    assert "(attempt 5 against the base model, with 3 versions " in by_hand
    for _ in range(2):
        register_version(model, samples_of(base=0, trained=1), tags={"sweep": "killed before it chose"})
    register_version(model, samples_of(base=0, trained=1))
    assert "with 4 versions " in promote(model).reason


@pytest.mark.slow
def test_force_promotes_and_the_mark_says_what_the_gate_said(model: str) -> None:
    make_champions(model, 1)
    register_version(model, samples_of(base=0, trained=4))
    refused = promote(model).reason
    assert promote(model, "2", force=True).decision == "forced"
    assert (tags_of(model, "2")["decision"], tags_of(model, "2")["reason"]) == ("forced", refused)
    assert history_of(model) == [("1", "promoted"), ("2", "forced")]
    register_version(model, samples_of(base=0, trained=30))
    assert promote(model, force=True).decision == "promoted"  # force is no mark where the gate agrees


def test_rules_are_those_recorded_and_a_changed_one_leaves_its_mark(model: str) -> None:
    strict = promotion_config(min_gain=0.5, guards=[{"metric": "kl", "max": 1}])
    register_version(model, samples_of(base=0, trained=10), config=strict)
    assert ": better, but min_gain asks for 50.0 points (attempt 1 " in promote(model).reason
    assert "changes" not in tags_of(model, "1")
    with pytest.raises(ConfigError, match=r"promotion.confidence = 2: Input should be less than 1"):
        promote(model, changes={"promotion": {"confidence": 2}})
    with pytest.raises(ConfigError, match=r"changes of train: .* only keys of promotion can differ here"):
        promote(model, changes={"train": {"max_steps": 1}})
    outcome = promote(model, changes={"promotion": {"min_gain": 0.1, "confidence": None}})
    assert outcome.decision == "promoted" and "guards kept: 1" in outcome.reason
    assert json.loads(tags_of(model, "1")["changes"]) == {"min_gain": 0.1}


def test_a_candidate_is_paired_with_the_champion_that_is_there_now(model: str) -> None:
    """By its own evaluation where that had this champion beside it, else only on the same prompts and settings."""
    make_champions(model, 1)
    beside = identity(connect().get_model_version(model, "1"))
    register_version(model, samples_of(base=0, champion=39, trained=40), key="other", champion=beside)
    assert "100.0% against 97.5% of champion version 1" in promote(model).reason
    register_version(
        model, samples_of(base=0, champion=0, trained=40), key="other", champion={**beside, "version": "7"}
    )
    assert "not evaluated beside the champion version 1" in (reason := refused(model))
    assert "`grpo stage evaluate --run simulated --force`" in reason
    assert "gain" not in tags_of(model, "3")


def test_a_version_without_an_evaluation_is_refused_unless_forced(model: str) -> None:
    client = connect()
    client.create_registered_model(model)
    run = client.create_run("0")
    client.create_model_version(model, f"{run.info.artifact_uri}/model", run.info.run_id)
    said = refused(model, "1")
    assert "no config.toml, evaluation/report.json, evaluation/samples.parquet in its MLflow run" in said
    assert promote(model, "1", force=True).decision == "forced"
    register_version(model, samples_of(base=0, trained=40))
    assert promote(model).decision == "refused"  # nothing is known of the champion either
    assert tags_of(model, "2")["reason"].startswith("version 1 has no config.toml")


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
    register_version(model, samples_of(base=0, trained=40))
    run = storage_root() / "runs" / "slower"
    run.mkdir(parents=True)
    (run / "registration.json").write_text(json.dumps({"model_name": model, "version": "7"}))
    assert CliRunner().invoke(app, ["promote", "slower"]).output == f"{model} has no version 7\n"
    assert CliRunner().invoke(app, ["promote", "slower", "--version", "8"]).output == f"{model} has no version 8\n"
    register_version("slower", samples_of(base=0, trained=40))
    assert CliRunner().invoke(app, ["promote", "slower", "--version", "9"]).output == "slower has no version 9\n"


@pytest.mark.slow
def test_rollbacks_lead_back_through_the_champions(model: str) -> None:
    make_champions(model, 3)
    assert rollback(model) == ("3", "2")
    assert champion_of(model) == "2"
    assert tags_of(model, "3")["rolled_back_to"] == "2"
    assert tags_of(model, "3")["decision"] == "promoted"
    assert rollback(model) == ("2", "1")
    with pytest.raises(PromotionError, match="has no champion before version 1"):
        rollback(model)
    assert promote(model, "3").decision == "promoted"
    assert "rolled_back_to" not in tags_of(model, "3")
    assert rollback(model) == ("3", "1")
    assert [version for version, _ in history_of(model)] == ["1", "2", "3", "2", "1", "3", "1"]


@pytest.mark.slow
def test_what_is_done_by_hand_in_mlflow_counts(model: str) -> None:
    make_champions(model, 2)
    client = connect()
    client.set_registered_model_alias(model, "champion", "1")
    register_version(model, samples_of(base=0, trained=16))
    assert promote(model).against == "1"  # of 16 prompts right, that 2 has right as well
    assert history_of(model) == [("1", "promoted"), ("2", "promoted"), ("1", "by hand"), ("3", "promoted")]
    assert rollback(model) == ("3", "1")
    assert rollback(model) == ("1", "2")
    client.delete_registered_model_alias(model, "champion")
    register_version(model, samples_of(base=0, trained=12))
    outcome = promote(model)
    assert outcome.against == "base"
    assert outcome.reason.endswith("there is no champion: version 2, the last one, lost the alias")
    client.delete_model_version(model, "2")
    assert rollback(model) == ("4", "1")  # the one before that still exists


@pytest.mark.slow
def test_the_reason_says_that_the_champion_was_deleted(model: str) -> None:
    make_champions(model, 2)
    connect().delete_model_version(model, "2")
    register_version(model, samples_of(base=0, trained=5))
    reason = promote(model).reason
    assert reason.endswith("; there is no champion: version 2, the last one, was deleted")
    assert tags_of(model, "3")["reason"] == reason


@pytest.mark.slow
def test_another_model_that_had_the_name_before_is_not_the_champion(model: str) -> None:
    """Version numbers begin at 1 again, and MLflow has no other number for a version."""
    make_champions(model, 1)
    former = identity(connect().get_model_version(model, "1"))
    connect().delete_registered_model(model)
    register_version(model, samples_of(base=0, trained=39))
    assert promote(model).decision == "promoted"
    register_version(model, samples_of(base=0, champion=0, trained=20), key="other", champion=former)
    assert "not evaluated beside the champion version 1" in refused(model)


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
        samples_of(base=0, trained=right).write_parquet(tmp_path / "evaluation" / "samples.parquet")
        tags = {"record": keep_record(client, run_id, tmp_path, key="same")}
        client.create_model_version(model, str(tmp_path), run_id, tags)
    refused = promote(model, "1")
    assert (refused.decision, "better, but min_gain asks for 90.0 points" in refused.reason) == ("refused", True)
    assert refused.reason.startswith("accuracy on held-out 25.0% against 0.0%")
    assert promote(model, "2").decision == "promoted"


@pytest.mark.slow
def test_an_arm_of_a_sweep_is_judged_on_prompts_by_which_it_was_not_chosen(model: str) -> None:
    gains = {"base": {}, "trained": {"held-out": 0.3, "general": 0.3}}
    samples = simulated_samples(1, gains)
    other = pl.when(pl.col("set") == "general").then("another " + pl.col("prompt")).otherwise("prompt")
    plain = promotion_config(set="general")
    arm = plain.model_copy(update={"registry": plain.registry.model_copy(update={"sweep": "sums.sweep"})})
    for own, answers, decision, sentence in [
        (arm, samples, "refused", "120 of 120 prompts of 'general' are among those"),
        (arm, samples.with_columns(prompt=other), "promoted", "better, p = "),
        (plain, samples, "refused", "not shown to be better"),
    ]:
        register_version(model, answers, config=own)
        outcome = promote(model)
        assert outcome.decision == decision
        assert sentence in outcome.reason
    register_version(model, samples.with_columns(prompt=other), config=arm)
    refused = promote(model, changes={"promotion": {"set": "held-out"}})
    assert refused.decision == "refused"
    assert refused.reason.startswith(
        "it is an arm of the sweep 'sums.sweep', which chooses on 'held-out', and 120 of 120"
    )
    assert promote(model, force=True).decision == "forced"
