"""The table of stages is the one place that lists them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.flows import load_flow_from_entrypoint
from typer.testing import CliRunner

from benchmarks.command import python_path
from flows.cli.main import app
from tasks.stages.table import ALL_STAGES, GPU_DEPLOYMENT
from tests.conftest import write_config
from tests.serving import plain_environment, prefect_server

PROJECT = Path(__file__).parents[2]
ORDER = ["validate", "plan", "train", "evaluate", "quantize", "register"]


@pytest.fixture(scope="module")
def quantizing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the project does with a table that has one stage more."""
    folder = tmp_path_factory.mktemp("quantizing")
    config = write_config(folder, changes={"rewards": [{"function": "numeric_match"}]})
    kept = plain_environment() | {
        "GRPO_STORAGE": str(folder / "storage"),
        "PYTHONPATH": python_path(PROJECT),
        "COLUMNS": "200",
    }
    with prefect_server(folder) as server:  # Prefect reads its address when the stage's task is defined
        done = subprocess.run(
            [sys.executable, "-m", "tests.quantizing", str(config)],
            cwd=PROJECT,
            env={**kept, **{name: server.environment[name] for name in ("PREFECT_API_URL", "PREFECT_HOME")}},
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.e2e
def test_a_stage_added_to_the_table_runs_in_its_place_and_is_seen_everywhere(quantizing: dict[str, Any]) -> None:
    assert quantizing["ran"] == quantizing["lineage"] == ORDER
    assert quantizing["ran by itself"] == ["quantize"]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in quantizing["status"].splitlines()]
    assert [row[0] for row in rows if row] == ORDER
    assert [row[4] for row in rows if row and row[0] == "quantize"] == ["8 bits"]
    # Only where a run asks for them: probe, warm-start and publish.
    stages = [ORDER[0], "probe", ORDER[1], "warm-start", *ORDER[2:], "publish"]
    offered = [*(f"{stage}/local" for stage in stages), "promote/local", "rollback/local", "clean/local"]
    assert quantizing["deployments"] == ["pipeline/local", "sweep/local", *offered]
    assert quantizing["handed over"] == ["train", "evaluate", "quantize"]


@pytest.mark.e2e
def test_a_run_validates_its_configuration_once_in_the_process_of_the_pipeline(quantizing: dict[str, Any]) -> None:
    assert quantizing["parsed"] == 1


FILES = [PROJECT / "prefect.yaml", *sorted((PROJECT / "docs").rglob("work-pools/*.yaml"))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_deployments_for_work_pools_are_those_of_the_table(file: Path) -> None:
    pipeline, *others = yaml.safe_load(file.read_text())["deployments"]
    stages = [it for it in others if "stage" in it["tags"]]
    assert [(it["name"], it["entrypoint"], it["work_pool"]["name"]) for it in stages] == [
        (pool, f"flows/stages.py:{stage.name}_run", pool)
        for stage in ALL_STAGES
        for pool in ["gpu" if stage.gpu else "cpu"]
    ]
    assert [it["entrypoint"] for it in others if it not in stages] == [
        "flows/sweep.py:sweep",
        "flows/promotion.py:promote",
        "flows/promotion.py:rollback",
        "flows/clean.py:clean",
    ]
    assert pipeline["entrypoint"] == "flows/pipeline.py:pipeline"
    assert pipeline["work_pool"]["job_variables"]["env"][GPU_DEPLOYMENT] == "gpu"


def test_each_entry_of_the_table_names_its_task_and_reads_only_stages_before_it() -> None:
    for position, stage in enumerate(ALL_STAGES):
        assert stage.load_task().name == stage.name
        assert set(stage.reads) <= {*ALL_STAGES[:position]}


def test_grpo_stage_names_the_stages_there_are() -> None:
    done = CliRunner().invoke(app, ["stage", "quantise", "--run", "test"])
    assert done.exit_code == 2
    assert f"'quantise' is not one of {', '.join(stage.name for stage in ALL_STAGES)}." in done.stderr
    help = " ".join(CliRunner().invoke(app, ["stage", "--help"]).stdout.split())
    assert f"one of {', '.join(stage.name for stage in ALL_STAGES)}" in help


def test_prefect_finds_the_flow_of_each_stage_by_its_entrypoint() -> None:
    for stage in ALL_STAGES:
        flow = load_flow_from_entrypoint(f"{PROJECT / 'flows' / 'stages.py'}:{stage.name}_run")
        assert (flow.name, [*flow.parameters.properties]) == (stage.name, ["run", "force"])
        assert flow.description is not None and flow.description.startswith(stage.meaning)
