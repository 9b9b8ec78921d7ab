"""Where MLflow is, and what the run of a training begins with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest

from grpo_core.config import RunConfig, parse_config
from tasks.stage import StageError
from tasks.tracking import connect, open_tracking_run, read_tracking_run, tracking_uri
from tests.conftest import config_values, write_sums


def test_a_tracking_uri_with_a_password_is_refused_without_saying_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://grpo:hidden@mlflow.internal")
    with pytest.raises(ValueError, match=r"a password of mlflow\.internal.*set MLFLOW_TRACKING_USERNAME") as error:
        tracking_uri()
    assert "hidden" not in str(error.value)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An embedded MLflow, in a storage root of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_STORAGE", str(tmp_path_factory.mktemp("storage")))
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield
    mlflow.set_tracking_uri(None)


@pytest.fixture
def run(store: None, tmp_path: Path) -> Path:
    """The directory of a run that is validated and planned."""
    (tmp_path / "dataset").mkdir()
    write_sums(tmp_path / "dataset" / "train.parquet", 10, 20)
    (tmp_path / "dataset" / "report.json").write_text(json.dumps({"num_prompts": {"train": 10}}))
    (tmp_path / "plan.json").write_text(json.dumps({"plan": {"max_steps": 4}}))
    (tmp_path / "training").mkdir()
    return tmp_path


def _config(run: Path, **changes: Any) -> RunConfig:
    return parse_config({**config_values(run / "model", run), **changes})


def test_a_training_is_tracked_whatever_keys_its_rewards_arguments_have(run: Path) -> None:
    """MLflow refuses names of parameters with other characters than letters, digits and _ - . / : and space."""
    schema = {"$defs": {"p": {"type": "integer"}}, "properties": {"a+b €": {"$ref": "#/$defs/p"}, "k" * 300: {}}}
    args = {"schema": schema, "keywords": ["x", "y"], "strict": True}
    config = _config(run, rewards=[{"function": "json_schema", "args": args}])
    params = connect().get_run(open_tracking_run(config, run, run / "training")["run_id"]).data.params
    assert json.loads(params["rewards.0.args.schema"]) == schema
    assert json.loads(params["rewards.0.args.keywords"]) == ["x", "y"]
    assert (params["rewards.0.args.strict"], params["train.max_steps"]) == ("True", "4")


def test_what_mlflow_refuses_is_not_called_a_server_that_does_not_answer_and_leaves_no_run_running(run: Path) -> None:
    (run / "plan.json").write_text(json.dumps({"plan": {"steps%": 4}}))
    config = _config(run, registry={"experiment": "refused"})
    with pytest.raises(StageError, match=r"refuses what it is asked: .*plan/steps%"):
        open_tracking_run(config, run, run / "training")
    client = connect()
    [made] = client.search_runs([client.get_experiment_by_name("refused").experiment_id])
    assert made.info.status == "FAILED"


def test_a_damaged_note_of_the_mlflow_run_begins_another_run_or_is_named(run: Path) -> None:
    (run / "training" / "mlflow.json").write_text("")
    with pytest.raises(StageError, match=r"mlflow\.json, which .* is missing or damaged.*grpo stage train --run"):
        read_tracking_run(run / "training")
    begun = open_tracking_run(_config(run), run, run / "training")
    assert read_tracking_run(run / "training") == begun
