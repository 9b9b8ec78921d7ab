"""A registered version served by a real vLLM: it answers as evaluated, and a promotion under load loses no request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w

from benchmarks.command import ROOT, python_path
from flows.serving.model_check import check_served
from grpo_core.system.tables import read_parquet
from tasks.registry.judging import Recorded
from tests.conftest import need_vllm, small_quickstart, write_inputs
from tests.readme import commands_of
from tests.serving import free_ports, mlflow_server, served_model
from tests.tasks.registry.evaluated import served_version

CLIENTS, REQUESTS = 8, 1000
VLLM = ("--", "--max-model-len", "32", "--enforce-eager")

# As the page says.
[EXPORTED] = [
    words for words in commands_of(ROOT / "docs" / "how-to" / "serve.md") if "MLFLOW_GATEWAY" in " ".join(words)
]
GATEWAY = dict(word.split("=") for word in EXPORTED[1:])

pytestmark = pytest.mark.e2e


# As a chat template of digits: no sign of its own.
TEMPLATE = "{% for each in messages %}{{ each['content'] }}{% endfor %}{{ sign }}"


@dataclass(frozen=True)
class Project:
    """A folder with runs, and its commands."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "GRPO_STORAGE": str(self.folder / "storage"), "PYTHONPATH": python_path(ROOT)}

    def grpo(self, *words: str) -> str:
        command = [sys.executable, "-m", "flows.cli.main", *words]
        options: Any = {"cwd": self.folder, "env": self.environment, "capture_output": True, "text": True}
        done = subprocess.run(command, timeout=1200, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, values: dict[str, Any]) -> pl.DataFrame:
        """Run the pipeline; returns what was evaluated."""
        (self.folder / "config.toml").write_text(tomli_w.dumps(values))
        self.grpo("run", "config.toml")
        return read_parquet(self.folder / "storage" / "runs" / values["name"] / "evaluation" / "samples.parquet")


def values_of(name: str, inputs: Path, rate: float) -> dict[str, Any]:
    values = small_quickstart(name, inputs, {"max_steps": 4, "learning_rate": rate})
    values["rewards"] = [{"function": "length", "args": {"target": 3}}]
    values["rollout"] |= {"num_generations": 8, "max_completion_length": 6, "stop": ["7"]}
    values["train"] |= {"gradient_accumulation_steps": 1, "mixed_precision": "no"}
    return values | {"registry": {"model_name": "sums"}}


def test_a_conversational_version_answers_messages_as_evaluated_without_its_system_prompt_being_said(
    tmp_path: Path,
) -> None:
    need_vllm()
    project, inputs = Project(tmp_path), write_inputs(tmp_path)
    for name in ("train", "eval"):
        table = pq.read_table(file := inputs / f"{name}.parquet")
        asked = [[{"role": "user", "content": prompt}] for prompt in table["prompt"].to_pylist()]
        pq.write_table(table.set_column(0, "prompt", pa.array(asked)), file)
    settings = inputs / "base" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": TEMPLATE}))
    values = values_of("talk", inputs, 1e-3)
    values["data"] |= {"system_prompt": "1+", "chat_template_kwargs": {"sign": "="}}
    samples = project.run(values)
    project.grpo("promote", "sums", "--version", "1", "--force")
    run = tmp_path / "storage" / "runs" / "talk"
    recorded = Recorded(tomllib.loads((run / "config.toml").read_text()), {}, samples)
    port, mlflow_port = free_ports(2)
    command = [sys.executable, "-m", "flows.cli.main", "serve-model", "sums@champion", "--port", str(port), *VLLM]
    options: Any = {"cwd": tmp_path, "env": project.environment}
    (gateway_folder := tmp_path / "gateway").mkdir()
    with (
        served_model(command, port, tmp_path / "log", "/health", **options) as url,
        mlflow_server(gateway_folder, mlflow_port, **GATEWAY),
        httpx2.Client(base_url=url, timeout=600) as client,
        httpx2.Client(base_url=f"http://127.0.0.1:{mlflow_port}", timeout=600) as gateway,
    ):
        make_endpoint(gateway, f"{url}/v1")
        for row in samples.iter_rows(named=True):
            system, user = row["prompt"]
            assert system["content"] == "1+"
            for asked, path in ((client, "/v1"), (gateway, "/gateway/openai/v1")):
                answer = asked.post(f"{path}/chat/completions", json={"model": "sums", "messages": [user]})
                [choice] = answer.raise_for_status().json()["choices"]
                assert choice["message"]["content"] == row["trained/completion"]
        found = check_served(url, "", served_version(run, run), recorded)
    assert (found.compared, found.equal, found.reward_change) == (32, 32, 0.0)


def make_endpoint(gateway: httpx2.Client, url: str) -> None:
    """As on the page AI Gateway of MLflow."""

    def make(kind: str, **values: Any) -> dict[str, Any]:
        answer = gateway.post(f"/api/3.0/mlflow/gateway/{kind}/create", json=values)
        [made] = answer.raise_for_status().json().values()
        return made

    key: dict[str, Any] = {"secret_value": {"api_key": "none"}, "auth_config": {"api_base": url}}
    secret = make("secrets", secret_name="sums", provider="openai", **key)["secret_id"]
    definition = make("model-definitions", name="sums", secret_id=secret, provider="openai", model_name="sums")
    model = {"model_definition_id": definition["model_definition_id"], "linkage_type": "PRIMARY", "weight": 1.0}
    make("endpoints", name="sums", model_configs=[model])


def test_a_promotion_under_load_changes_the_answers_and_loses_no_request(tmp_path: Path) -> None:
    need_vllm()
    project, inputs = Project(tmp_path), write_inputs(tmp_path)
    grpo, environment = project.grpo, project.environment
    samples = [project.run(values_of(f"run{n}", inputs, rate)) for n, rate in enumerate((1e-3, 1e-2), 1)]
    prompts = samples[0]["prompt"].to_list()
    evaluated = [dict(zip(prompts, of["trained/completion"], strict=True)) for of in samples]
    assert evaluated[0] != evaluated[1]
    grpo("promote", "sums", "--version", "1", "--force")
    [port] = free_ports(1)
    assert "32 of 32 held-out prompts" in grpo("serve-model", "sums@champion", "--port", str(port), "--check", *VLLM)

    command = [sys.executable, "-m", "flows.cli.main", "serve-model", "sums@champion", "--port", str(port), *VLLM]
    with (
        served_model(command, port, tmp_path / "log", "/health", cwd=tmp_path, env=environment) as url,
        ThreadPoolExecutor(CLIENTS) as clients,
        httpx2.Client(base_url=url, timeout=600) as client,
    ):

        def ask(number: int) -> tuple[str, str]:
            asked: dict[str, Any] = {"model": "sums", "prompt": prompts[number % len(prompts)]}
            answer = client.post("/v1/completions", json=asked).raise_for_status().json()
            return asked["prompt"], answer["choices"][0]["text"]

        found = list(clients.map(ask, range(64)))
        assert found == [(prompt, evaluated[0][prompt]) for prompt, _ in found]
        under_way = [clients.submit(ask, number) for number in range(REQUESTS)]
        grpo("promote", "sums", "--version", "2", "--force")
        while client.get("/health").json()["version"] != "2":
            under_way += [clients.submit(ask, number) for number in range(CLIENTS)]
            under_way[-1].result()
        for prompt, text in (each.result() for each in under_way):
            assert text in {of[prompt] for of in evaluated}
        found = list(clients.map(ask, range(64)))
        assert found == [(prompt, evaluated[1][prompt]) for prompt, _ in found]
