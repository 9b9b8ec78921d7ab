"""A training on the completions of an earlier run: nothing is sampled, and no reward is called."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from grpo_core.errors import ConfigError, NotFiniteError
from grpo_core.training import loop as trainer
from grpo_core.training import session as sessions
from grpo_core.training.loop import train
from tests.conftest import config_values, make_model, make_run, with_keys, write_sums
from tests.grpo_core.training import killing
from tests.grpo_core.training.plain_training import assert_plain
from tests.grpo_core.training.several import exit_statuses, in_two_processes
from tests.grpo_core.training.training import assert_same, figures_of, metrics_of, result_of, trained_run
from tests.teacher_server import teacher_server

MODEL = Path("training/model/model.safetensors")
# Everything that follows from what was sampled: old log-probabilities, KL, entropies, masks.
OFF_POLICY = {
    "num_iterations": 2,
    "beta": 0.1,
    "mask_truncated_completions": True,
    "top_entropy_quantile": 0.8,
    "entropy_coef": 0.01,
}


@pytest.fixture(scope="module")
def recorded(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two generation batches."""
    folder = tmp_path_factory.mktemp("recorded")
    return trained_run(folder / "run", config_values(model_folder, folder), max_steps=2)


def on_recording(recording: Path, values: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return with_keys(values, engine="recorded", recording=str(recording), **keys)


def replayed(folder: Path, recording: Path, values: dict[str, Any], **keys: Any) -> Path:
    """A training on the recording, which would fail if it wanted an engine or a reward."""
    run = make_run(folder, on_recording(recording, values, **keys))
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(sessions, "make_engine")
        patch.delattr(sessions, "rewards_of")
        train(run, run / "training")
    return run


def completions_of(run: Path, index: int) -> list[dict[str, Any]]:
    return pq.read_table(run / "training" / "completions" / f"rollout-{index:06d}.parquet").to_pylist()


def assert_replayed(run: Path, recorded: Path) -> None:
    """Bit for bit; figures of the sampling itself and of evaluations are the recorded run's alone."""
    of_sampling = (
        *("sampling/sync_drift", "sampling/outside_share", "dynamic_sampling/"),
        *("conversations/", "environment/", "tools/", "slowest/", "eval_"),
    )
    expected = [{k: v for k, v in row.items() if not k.startswith(of_sampling)} for row in figures_of(recorded)]
    assert figures_of(run) == expected
    assert (run / MODEL).read_bytes() == (recorded / MODEL).read_bytes()
    assert result_of(run)["counted"] == result_of(recorded)["counted"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "of_sampling"),
    [
        pytest.param({}, {}, id="on-policy", marks=pytest.mark.e2e),
        pytest.param(OFF_POLICY, {}, id="off-policy"),
        pytest.param({"use_peft": True, "lora_r": 4, "lora_dropout": 0.2, "beta": 0.1}, {}, id="adapter"),
        pytest.param({"max_steps": 2, "top_k": 5}, {"dynamic_sample": True}, id="of replaced groups"),
        pytest.param({"max_steps": 2}, {"eval_steps": 1}, id="without evaluations"),
        pytest.param({"max_steps": 2, "taught": {}}, {}, id="taught by itself"),
        pytest.param({"max_steps": 2, "taught": {"divergence_beta": 0.6}}, {}, id="taught by a divergence from itself"),
    ],
)
def test_a_training_on_a_recording_does_what_the_recorded_one_did(
    values: dict[str, Any], tmp_path: Path, keys: dict[str, Any], of_sampling: dict[str, Any]
) -> None:
    values["rewards"].append({"function": "tests.grpo_core.training.test_options:only_odd_prompts_apply"})  # else None
    if "taught" in keys:
        values["teacher"] = {"template": "{better}+{prompt}", **keys["taught"]}
        keys = {"max_steps": keys["max_steps"]}
    recorded = trained_run(tmp_path / "recorded", values, **keys, **of_sampling)
    run = replayed(tmp_path / "run", recorded, values, **keys)
    assert_replayed(run, recorded)
    again = replayed(tmp_path / "again", run, values, **keys)
    assert_replayed(again, recorded)


@pytest.mark.slow
def test_a_teacher_behind_a_server_is_asked_only_for_what_the_recording_lacks(
    values: dict[str, Any], tmp_path: Path
) -> None:
    """Its answers are bit for bit those of a training that asks for all of them, also in a recording of a recording."""
    with teacher_server(make_model(tmp_path / "teacher", hidden_size=32, initializer_range=0.1)) as server:

        def asked(start: int) -> set[tuple[int, ...]]:
            """Sequences, without that of the check before a training."""
            bodies = [body for path, body in server.said[start:] if path == "/v1/completions"]
            return {tuple(body["prompt"]) for body in bodies if len({*body["prompt"]}) > 1}

        def after(name: str, recording: Path, **keys: Any) -> tuple[Path, set[tuple[int, ...]]]:
            start = len(server.said)
            return replayed(tmp_path / name, recording, values, max_steps=2, **keys), asked(start)

        values["teacher"] = {"url": server.url, "weight": 0.5}
        masked = {"mask_truncated_completions": True}
        recorded = trained_run(tmp_path / "recorded", values, max_steps=2, **masked)
        sampled = [row for index in range(2) for row in completions_of(recorded, index)]
        cut = {(*row["prompt_ids"], *row["completion_ids"]) for row in sampled if row["truncated"]}
        whole = {(*row["prompt_ids"], *row["completion_ids"]) for row in sampled if not row["truncated"]}
        assert cut and asked(0) == whole
        run, again = after("run", recorded, **masked)
        assert_replayed(run, recorded)
        more, missing = after("more", run)
        less, none = after("less", more, **masked)
        assert_replayed(less, recorded)
        assert (again, missing, none) == (set(), cut, set())
        values["teacher"]["model"] = server.name
        fresh, everything = after("fresh", more)
        assert everything == cut | whole, "known by another name"
        assert_replayed(fresh, more)


@pytest.mark.slow
def test_processes_share_the_work_on_a_recording_as_they_did_when_it_was_made(
    values: dict[str, Any], tmp_path: Path
) -> None:
    values = with_keys(values, num_processes=2, per_device_train_batch_size=4, max_steps=2)
    recorded = make_run(tmp_path / "recorded", values)
    run = make_run(tmp_path / "run", on_recording(recorded, values))
    for each in (recorded, run):
        in_two_processes(tmp_path / f"group-{each.name}", lambda _, each=each: train(each, each / "training"))
    assert_replayed(run, recorded)


def _killed_in_update(run: Path, number: int) -> Callable[[int], None]:
    """A training of which the second process is killed in that update."""

    def work(rank: int) -> None:
        update, calls = trainer.update, itertools.count(1)

        def deadly(*arguments: Any) -> dict[str, float]:
            if rank == 1 and next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return update(*arguments)

        trainer.update = deadly  # in this process alone
        train(run, run / "training")

    return work


@pytest.mark.served
def test_one_of_two_processes_is_killed_and_the_recording_has_a_served_teachers_answers_all_the_same(
    values: dict[str, Any], tmp_path: Path
) -> None:
    """As they are recorded, and as the recording is trained on, for which the server is not asked."""
    keys = {"num_processes": 2, "per_device_train_batch_size": 4, "max_steps": 4, "save_steps": 1}
    with teacher_server(make_model(tmp_path / "teacher", hidden_size=32, initializer_range=0.1)) as server:
        values["teacher"] = {"url": server.url, "weight": 0.5}
        values = with_keys(values, **keys)
        in_both = {"recorded": values, "replayed": on_recording(tmp_path / "recorded-whole", values)}
        for name, of_run in in_both.items():
            start = len(server.said)
            whole, run = (make_run(tmp_path / f"{name}-{kind}", of_run) for kind in ("whole", "killed"))
            in_two_processes(tmp_path / f"{name}-1", lambda _, run=whole: train(run, run / "training"))
            statuses = exit_statuses(2, tmp_path / f"{name}-2", _killed_in_update(run, 3))
            assert statuses[1] == -signal.SIGKILL
            assert statuses[0] > 0
            in_two_processes(tmp_path / f"{name}-3", lambda _, run=run: train(run, run / "training"))
            assert result_of(run)["resumed_at_step"] in (1, 2)
            assert_same(run, whole)
            if name == "recorded":
                for index in range(4):
                    assert completions_of(run, index) == completions_of(whole, index)
                    taught = [row[f"teacher_logprobs/{server.url}"] for row in completions_of(run, index)]
                    assert all(taught) and all(max(row) < 0 for row in taught)
            asked = [body["prompt"] for path, body in server.said[start:] if path == "/v1/completions"]
            sampled = any(len({*prompt}) > 1 for prompt in asked)  # else that of the check before a training
            assert sampled == (name == "recorded")
        assert_replayed(run, tmp_path / "recorded-whole")


@pytest.mark.slow
def test_another_loss_on_the_same_samples_is_that_of_plain_loops(
    values: dict[str, Any], recorded: Path, tmp_path: Path
) -> None:
    """The second update, of a policy that never sampled: with other weights of the rewards, another loss, and the ratio
    to the recorded log-probabilities as the sampling correction."""
    values["rewards"][0]["weight"], values["rewards"][1]["weight"] = 0.25, 2.0
    keys: dict[str, Any] = {"loss_type": "dr_grpo", "scale_rewards": "none", "learning_rate": 0.06}
    keys |= {"vllm_importance_sampling_mode": "token_truncate", "adam_epsilon": 1e-3, "max_steps": 2}
    run = replayed(tmp_path / "run", recorded, values, **keys)
    assert metrics_of(run)[1]["sampling/sampling_logp_difference/max"] > 0.3, "another policy than the one that sampled"
    assert_plain(run)


@pytest.mark.slow
def test_a_training_on_a_recording_killed_at_any_micro_step_ends_with_the_same_weights(
    values: dict[str, Any], tmp_path: Path
) -> None:
    recorded = trained_run(tmp_path / "recorded", values, **OFF_POLICY)
    values = on_recording(recorded, values, **OFF_POLICY, save_steps=1)
    whole = make_run(tmp_path / "whole", values)
    assert killing.train(whole) == 0
    passes = int((whole / "passes").read_text())
    for kill_at in (passes // 2, passes - 1):
        run = make_run(tmp_path / f"killed-at-{kill_at}", values)
        assert os.WTERMSIG(killing.train(run, kill_at)) == signal.SIGKILL
        assert killing.train(run) == 0
        assert_same(run, whole)
    assert result_of(run)["resumed_at_step"], "the last kill fell behind a checkpoint"


def test_the_evaluation_after_it_samples(values: dict[str, Any], recorded: Path, tmp_path: Path) -> None:
    from grpo_core.evaluation.run import evaluate  # needs polars, which a training does not

    run = replayed(tmp_path / "run", recorded, values, max_steps=2)
    reports = [evaluate(each, each) for each in (run, recorded)]
    found, expected = (report["sets"]["held-out"]["policies"] for report in reports)
    assert found == expected


def test_a_batch_that_was_sampled_again_is_the_one_sampled_last(
    values: dict[str, Any], recorded: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(recorded, tmp_path / "copied")
    file = copied / "training" / "completions" / "rollout-000000.parquet"
    table, later = pq.read_table(file), pq.read_table(file.with_name("rollout-000001.parquet"))
    assert {*table["step"].to_pylist()} == {1} and {*later["step"].to_pylist()} == {2}
    pq.write_table(pa.concat_tables([table, later]), file)
    run = replayed(tmp_path / "run", copied, values, max_steps=1)
    assert [row["completion_ids"] for row in completions_of(run, 0)] == later["completion_ids"].to_pylist()


def _cut(run: Path, values: dict[str, Any]) -> None:
    file = run / "training" / "completions" / "rollout-000001.parquet"
    file.write_bytes(file.read_bytes()[:-100])


def _written_earlier(run: Path, values: dict[str, Any]) -> None:
    file = run / "training" / "completions" / "rollout-000000.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["sampling_logprobs"]), file)


def _of_whole_vocabulary(run: Path, values: dict[str, Any]) -> None:
    """As a version before wrote it, whatever it left out."""
    for file in (run / "training" / "completions").iterdir():
        table = pq.read_table(file)
        known = json.loads(table.schema.metadata[b"grpo"])
        left = {name: value for name, value in known.items() if name not in ("top_p", "top_k", "min_p")}
        pq.write_table(table.replace_schema_metadata({"grpo": json.dumps(left)}), file)


def _unscored(run: Path, values: dict[str, Any]) -> None:
    values["rewards"].append({"function": "repetition_penalty"})


def _another_tokenizer(run: Path, values: dict[str, Any]) -> None:
    folder = shutil.copytree(values["model"]["name_or_path"], run / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["?"])
    tokenizer.save_pretrained(folder)
    values["model"]["name_or_path"] = str(folder)


@pytest.mark.parametrize(
    ("keys", "change", "message"),
    [
        ({"num_generations": 8}, None, "rollout.num_generations is 4 in the recording, and 8 here"),
        ({"gradient_accumulation_steps": 1}, None, "per generation batch is 16 in the recording, and 8 here"),
        ({"temperature": 0.5}, None, "rollout.temperature is 1 in the recording, and 0.5 here"),
        ({"repetition_penalty": 1.2}, None, "rollout.repetition_penalty is 1 in the recording, and 1.2 here"),
        ({"max_completion_length": 5}, None, "of up to 6 tokens; rollout.max_completion_length=5 has to be at least"),
        ({"max_steps": 3}, None, "has 2 generation batches, and the plan takes 3: set train.max_steps to 2 or less"),
        ({"max_steps": 5, "num_iterations": 2}, None, "the plan takes 3: set train.max_steps to 4 or less"),
        ({}, _unscored, "no values of the reward 'repetition_penalty', only of numeric_match, length"),
        ({}, _cut, r"rollout-000001.parquet cannot be read"),
        ({}, _written_earlier, "an older version has written it; record again"),
        ({}, _another_tokenizer, "token ids of another vocabulary"),
        ({"top_p": 0.9}, _of_whole_vocabulary, "rollout.top_p is 1 in the recording, and 0.9 here"),
    ],
)
def test_a_recording_that_lacks_what_the_plan_takes_is_refused_before_a_model_is_loaded(
    values: dict[str, Any],
    recorded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keys: dict[str, Any],
    change: Callable[[Path, dict[str, Any]], None] | None,
    message: str,
) -> None:
    monkeypatch.delattr(sessions, "_load_model")
    recording = shutil.copytree(recorded, tmp_path / "recorded")
    if change:
        change(recording, values)
    run = make_run(tmp_path / "run", on_recording(recording, values, **{"max_steps": 2, **keys}))
    with pytest.raises(ConfigError, match=message):
        train(run, run / "training")


def test_a_recording_of_other_prompts_of_nothing_or_of_the_run_itself_is_refused(
    values: dict[str, Any], recorded: Path, tmp_path: Path
) -> None:
    other = make_run(tmp_path / "other", on_recording(recorded, values, max_steps=2))
    write_sums(other / "dataset" / "train.parquet", 11, 35)
    with pytest.raises(ConfigError, match=r"has another prompt in row \d+ than data.train="):
        train(other, other / "training")
    empty = make_run(tmp_path / "empty", on_recording(tmp_path / "nowhere", values, max_steps=2))
    with pytest.raises(ConfigError, match="name the directory of a run that has trained"):
        train(empty, empty / "training")
    own = make_run(tmp_path / "own", on_recording(tmp_path / "own", values, max_steps=2))
    with pytest.raises(ConfigError, match="is the directory of this run, whose training would overwrite it"):
        train(own, own / "training")


def test_a_recording_of_before_is_trained_on_over_the_whole_vocabulary(
    values: dict[str, Any], recorded: Path, tmp_path: Path
) -> None:
    recording = shutil.copytree(recorded, tmp_path / "recorded")
    _of_whole_vocabulary(recording, values)
    assert_replayed(replayed(tmp_path / "run", recording, values, max_steps=2), recorded)


def test_an_unfinished_run_is_a_recording_of_what_it_has_sampled(
    values: dict[str, Any], recorded: Path, tmp_path: Path
) -> None:
    stopped = tmp_path / "stopped"
    shutil.copytree(recorded / "training" / "completions", stopped / "training.partial" / "completions")
    run = replayed(tmp_path / "run", stopped, values, max_steps=2)
    assert_replayed(run, recorded)


def test_a_training_on_a_recording_that_rolls_back_goes_on_with_the_same_samples(
    values: dict[str, Any], recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, calls = trainer.update, []

    def failing_first(*arguments: Any) -> dict[str, float]:
        calls.append(arguments)
        if len(calls) == 1:
            raise NotFiniteError("step 1")
        return update(*arguments)

    monkeypatch.setattr(trainer, "update", failing_first)
    run = replayed(tmp_path / "run", recorded, values, max_steps=2, not_finite_action="roll_back")
    assert result_of(run)["roll_backs"] == 1
    for index in range(2):
        ids = [[row["completion_ids"] for row in completions_of(each, index)] for each in (run, recorded)]
        assert ids[0] == ids[1]
