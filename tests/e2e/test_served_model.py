"""A registered version served by a real vLLM: it answers as evaluated, and a promotion under load loses no request."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
import tomli_w

from benchmarks.command import ROOT, python_path
from grpo_core.system.tables import read_parquet
from tests.conftest import need_vllm, small_quickstart, write_inputs
from tests.serving import free_ports, served_model

CLIENTS, REQUESTS = 8, 1000
VLLM = ("--", "--max-model-len", "32", "--enforce-eager")

pytestmark = pytest.mark.e2e


def test_a_promotion_under_load_changes_the_answers_and_loses_no_request(tmp_path: Path) -> None:
    need_vllm()
    inputs = write_inputs(tmp_path)
    environment = {**os.environ, "GRPO_STORAGE": str(tmp_path / "storage"), "PYTHONPATH": python_path(ROOT)}

    def grpo(*words: str) -> str:
        command = [sys.executable, "-m", "flows.cli.main", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    for number, rate in enumerate((1e-3, 1e-2), 1):
        values = small_quickstart(f"run{number}", inputs, {"max_steps": 4, "learning_rate": rate})
        values["rewards"] = [{"function": "length", "args": {"target": 3}}]
        values["rollout"] |= {"num_generations": 8, "max_completion_length": 6, "stop": ["7"]}
        values["train"] |= {"gradient_accumulation_steps": 1, "mixed_precision": "no"}
        values["registry"] = {"model_name": "sums"}
        (tmp_path / "config.toml").write_text(tomli_w.dumps(values))
        grpo("run", "config.toml")
    samples = [
        read_parquet(tmp_path / "storage" / "runs" / f"run{number}" / "evaluation" / "samples.parquet")
        for number in (1, 2)
    ]
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
