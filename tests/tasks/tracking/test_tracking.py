"""Where MLflow is, and what the run of a training begins with."""

from __future__ import annotations

import getpass
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow.utils.rest_utils import MlflowHostCreds, http_request

from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.errors import GrpoError
from grpo_core.planning.hardware import Gpu, name_hardware
from tasks.stages.errors import StageError
from tasks.stages.lineage import lineage_keys
from tasks.stages.mlflow_address import TrackingError, describe, tracking_uri
from tasks.tracking import runs as tracking
from tasks.tracking.earlier_runs import earlier_throughput
from tasks.tracking.runs import connect, open_tracking_run, read_tracking_run, run_address
from tests.conftest import config_values, write_sums
from tests.web import Quiet, answering


def test_a_tracking_uri_with_a_password_is_refused_without_saying_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://grpo:hidden@mlflow.internal")
    with pytest.raises(GrpoError, match=r"_URI contains a user, password.*set MLFLOW_TRACKING_USERNAME") as error:
        tracking_uri()
    assert "hidden" not in str(error.value)


class _Failing(Quiet):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.send_error(500)

    do_GET = do_PUT = do_POST


@pytest.mark.slow
@pytest.mark.parametrize(
    "ask",
    [lambda client, _: client.search_experiments(), lambda _, credentials: http_request(credentials, "/file", "PUT")],
    ids=["a request", "an artifact"],
)
def test_a_server_that_answers_with_errors_is_not_called_dead(
    ask: Callable[[mlflow.MlflowClient, MlflowHostCreds], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that does not reach its bucket."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    with answering(_Failing) as url:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        with pytest.raises(mlflow.MlflowException) as error:
            ask(mlflow.MlflowClient(url), MlflowHostCreds(url))
    assert re.match(rf"MLflow at {url} answers with an error \(.*500.*\): see what it wrote", describe(error.value))


@pytest.mark.slow
def test_each_storage_root_has_a_store_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embed_mlflow: Callable[[Path], None]
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    embed_mlflow(tmp_path / "second")  # the first has none yet
    for name in ("first", "second"):
        monkeypatch.setenv("GRPO_STORAGE", str(tmp_path / name))
        assert connect().tracking_uri == f"sqlite:///{tmp_path / name / 'mlflow' / 'mlflow.db'}"


@pytest.fixture
def run(mlflow_client: mlflow.MlflowClient, tmp_path: Path) -> Path:
    """The directory of a run that is validated and planned."""
    (tmp_path / "dataset").mkdir()
    write_sums(tmp_path / "dataset" / "train.parquet", 10, 20)
    (tmp_path / "dataset" / "report.json").write_text(json.dumps({"num_prompts": {"train": 10}}))
    (tmp_path / "plan.json").write_text(json.dumps({"plan": {"max_steps": 4}}))
    (tmp_path / "training").mkdir()
    return tmp_path


def _config(run: Path, **changes: Any) -> RunConfig:
    return parse_config({**config_values(run / "model", run), **changes})


@pytest.mark.slow
def test_a_training_is_tracked_whatever_keys_its_rewards_arguments_have(run: Path) -> None:
    """MLflow refuses names of parameters with other characters than letters, digits and _ - . / : and space."""
    schema = {"$defs": {"p": {"type": "integer"}}, "properties": {"a+b €": {"$ref": "#/$defs/p"}, "k" * 300: {}}}
    args = {"schema": schema, "keywords": ["x", "y"], "strict": True}
    environment = {
        "environment_factory": {"a+b €": "tests.grpo_core.environments.playing:Dice"},
        "environment_args": {"a+b €": {"size": 3}},
    }
    rewards = [{"function": "json_schema", "args": args}]
    data = {**config_values(run / "model", run)["data"], "chat_template_kwargs": {"k+€": True}}
    config = _config(run, rewards=rewards, environment=environment, data=data)
    params = connect().get_run(open_tracking_run(config, run, run / "training")["run_id"]).data.params
    assert json.loads(params["rewards.0.args.schema"]) == schema
    assert json.loads(params["rewards.0.args.keywords"]) == ["x", "y"]
    assert json.loads(params["environment.environment_args"]) == environment["environment_args"]
    assert json.loads(params["data.chat_template_kwargs"]) == {"k+€": True}
    assert (params["rewards.0.args.strict"], params["train.max_steps"]) == ("True", "4")


@pytest.mark.slow
def test_a_training_is_tracked_with_the_source_of_its_own_rewards(run: Path) -> None:
    for place in ("mine.py", "house/tone.py", "__pycache__/mine.cpython-311.pyc"):
        (run / "rewards" / place).parent.mkdir(parents=True, exist_ok=True)
        (run / "rewards" / place).write_text(place)
    run_id = open_tracking_run(_config(run), run, run / "training")["run_id"]
    copied = Path(connect().download_artifacts(run_id, "rewards"))
    files = [path for path in copied.rglob("*") if path.is_file()]
    assert {path.relative_to(copied).as_posix(): path.read_text() for path in files} == {
        place: place for place in ("mine.py", "house/tone.py")
    }


@pytest.mark.slow
def test_what_mlflow_refuses_is_not_called_a_server_that_does_not_answer_and_leaves_no_run_running(run: Path) -> None:
    (run / "plan.json").write_text(json.dumps({"plan": {"steps%": 4}}))
    config = _config(run, registry={"experiment": "refused"})
    with pytest.raises(TrackingError, match=r"refuses the request: .*plan\.steps%"):
        open_tracking_run(config, run, run / "training")
    client = connect()
    [made] = client.search_runs([client.get_experiment_by_name("refused").experiment_id])
    assert made.info.status == "FAILED"


@pytest.mark.slow
def test_a_damaged_note_of_the_mlflow_run_begins_another_run_or_is_named(run: Path) -> None:
    (run / "training" / "mlflow.json").write_text("")
    with pytest.raises(StageError, match=r"mlflow\.json, which .* is missing or damaged.*grpo stage train --run"):
        read_tracking_run(run / "training")
    begun = open_tracking_run(_config(run), run, run / "training")
    assert read_tracking_run(run / "training") == begun


def test_a_run_in_mlflow_says_who_trained_with_which_code_on_what(run: Path) -> None:
    config = _config(run)
    begun = connect().get_run(open_tracking_run(config, run, run / "training")["run_id"])
    tags = begun.data.tags
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    commit = tags.get("mlflow.source.git.commit", "")  # none where the source has no history
    assert (tags["mlflow.source.name"], commit) == ("grpo-flows", head.stdout.strip())
    assert tags["mlflow.user"] == getpass.getuser()
    assert "Not evaluated yet" in tags["mlflow.note.content"]
    assert str(run) in tags["mlflow.note.content"]
    assert not [name for name in tags if name.startswith("lineage")], "hashes are no tags"
    lineage = Path(connect().download_artifacts(begun.info.run_id, "lineage.txt")).read_text()
    assert f"train {lineage_keys(config)['train']}\n" in lineage
    assert begun.data.params["plan.max_steps"] == "4"
    assert not begun.data.metrics, "constants of the plan are no charts"
    [train] = [given.dataset for given in begun.inputs.dataset_inputs if given.dataset.name == "train"]
    assert len(train.digest) == 12
    assert run_address(run / "training").endswith("?workflowType=machine_learning")


def test_further_evaluation_sets_are_among_the_runs_data(run: Path) -> None:
    write_sums(run / "dataset" / "eval-hard.parquet", 30, 35)
    report = {"num_prompts": {"train": 10, "eval-hard": 5}}
    (run / "dataset" / "report.json").write_text(json.dumps(report))
    evaluation = {"sets": [{"name": "hard", "data": "somewhere/hard", "split": "validation"}]}
    config = _config(run, evaluation=evaluation, registry={"experiment": "sets"})
    begun = connect().get_run(open_tracking_run(config, run, run / "training")["run_id"])
    found = {it.dataset.name: it.dataset for it in begun.inputs.dataset_inputs}
    assert json.loads(found["eval-hard"].source) == {"path": "somewhere/hard", "split": "validation"}


@pytest.mark.slow
def test_an_experiment_opens_as_model_training_unless_somebody_chose_otherwise(run: Path) -> None:
    client = connect()
    kinds = {}
    for name, kind in {"new": None, "old": "", "chosen": "genai_development"}.items():
        if kind is not None:
            client.create_experiment(name, tags={"mlflow.experimentKind": kind} if kind else {})
        (run / name).mkdir()
        open_tracking_run(_config(run, registry={"experiment": name}), run, run / name)
        tags = client.get_experiment_by_name(name).tags
        kinds[name] = tags["mlflow.experimentKind"]
        assert json.loads(tags["mlflow.sharedViewState.grpo-results"])["name"] == "Results"
    assert kinds == {
        "new": "custom_model_development",
        "old": "custom_model_development",
        "chosen": "genai_development",
    }


@pytest.mark.slow
def test_the_pace_of_earlier_runs_is_that_of_the_same_hardware(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(run, registry={"experiment": "paces"})
    client = connect()
    (run / "plan.json").write_text(json.dumps({"plan": {"max_steps": 4, "generation_batch_size": 20}}))
    for name, tokens in {"here": 100, "NVIDIA H200": 9000}.items():
        monkeypatch.setattr(tracking, "find_gpu", lambda name=name: None if name == "here" else Gpu(name))
        (run / name).mkdir()
        run_id = open_tracking_run(config, run, run / name)["run_id"]
        begun = client.get_run(run_id).info.start_time
        measured = {"step_time": 2.0, "num_tokens": tokens, "completions/mean_length": 5.0}
        times = {"time/generate": 0.75, "time/score": 0.25} if name == "here" else {}
        for metric, value in (measured | times).items():
            client.log_metric(run_id, metric, value, timestamp=begun + 9000)
        client.set_terminated(run_id)
    here, there, any_of_them = (earlier_throughput(config, name) for name in (name_hardware(None), "h200", ""))
    assert here and there and any_of_them
    assert (here.tokens_per_second, there.tokens_per_second) == (50, 4500)
    assert (here.sample_seconds, there.sample_seconds) == (1 / 20, None)
    assert here.other_seconds == pytest.approx(7)  # of the 9 until the last update was done
    assert f"on {name_hardware(None)}: 50 tokens/s per process" in here.how
    assert "on NVIDIA H200, CPU" in any_of_them.how
    assert earlier_throughput(config, "NVIDIA L4") is None


@pytest.mark.slow
def test_the_pace_of_conversations_is_that_of_runs_with_the_same_environment(run: Path) -> None:
    acting = {
        "environment_factory": {"a maze!": "openenv", "chess": "textarena"},
        "environment_args": {"chess": {"n": 8}},
    }
    plain, calling, playing = (
        _config(run, registry={"experiment": "turns"}, environment=environment)
        for environment in ({}, {"tools": ["calculator"]}, acting)
    )
    client = connect()
    measured = {"step_time": 2.0, "num_tokens": 100, "completions/mean_length": 5.0}
    turns = {"conversations/mean_turns": 2.5, "conversations/environment_share": 0.75}
    for name, config, metrics in (("plain", plain, measured), ("playing", playing, measured | turns)):
        (run / name).mkdir()
        run_id = open_tracking_run(config, run, run / name)["run_id"]
        for metric, value in metrics.items():
            client.log_metric(run_id, metric, value)
        client.set_terminated(run_id)
    recorded = _config(run, registry={"experiment": "turns"}, rollout={"engine": "recorded", "recording": "a"})
    assert earlier_throughput(recorded, "") is None, "nothing is sampled there"
    alone, none, played = (earlier_throughput(config, "") for config in (plain, calling, playing))
    assert alone and played and none is None
    assert (alone.completion_tokens, played.completion_tokens) == (5, 20)
    assert "completions of 5 tokens at their end" in alone.how
    assert "conversations of 2.5 turns and 20 tokens, waiting for environments included, at their end" in played.how
