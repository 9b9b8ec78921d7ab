"""Measures the CPU time that a vLLM server's answers cost its API process and the trainer, as bytes and as vLLM's
JSON."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import psutil

from grpo_core.rollout.vllm import binary
from tests.conftest import config_values, make_model, make_run
from tests.serving import free_ports, policy_server

GROUP = 8  # completions per request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--completions", type=int, default=64, help="default 64")
    parser.add_argument("--tokens", type=int, default=512, help="of each; default 512")
    parser.add_argument("--rounds", type=int, default=5, help="of each way; default 5")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), arguments.completions, arguments.tokens, arguments.rounds)
    print("CPU milliseconds per 1,000 tokens, the least of the rounds; bytes per token")
    for way, (server, trainer, size) in found.items():
        print(f"{way}: server {server:.2f}, trainer {trainer:.3f}, {size:.0f} bytes")


def measure(folder: Path, completions: int, tokens: int, rounds: int) -> dict[str, tuple[float, float, float]]:
    """Measure, for each form of the answer, CPU milliseconds per 1,000 tokens in the server's API process and for
    reading here, and bytes per token."""
    ways: dict[str, tuple[str, Callable[[bytes], Any]]] = {
        "JSON": ("/inference/v1/generate", _read_json),
        "bytes": (binary.PATH, binary.decode),
    }
    found = {way: (float("inf"), float("inf"), 0.0) for way in ways}
    (port,) = free_ports(1)
    model = make_model(folder / "model", max_position_embeddings=2 * tokens)
    keys = {"vllm_server_base_urls": [f"http://127.0.0.1:{port}"]}
    run = make_run(folder / "run", config_values(model, folder, engine="vllm-server", **keys))
    with (
        policy_server(run / "config.toml", port, folder / "server.log") as process,
        httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=600, trust_env=False) as client,
        ThreadPoolExecutor(completions // GROUP) as asking,
    ):
        _wait(client)
        server = psutil.Process(process.pid)
        for turn in range(rounds + 1):  # the first warms up
            for way, (path, read) in ways.items():
                before = _cpu_seconds(server)
                answers = [*asking.map(partial(_ask, client, path, tokens), range(completions // GROUP))]
                spent, start = _cpu_seconds(server) - before, time.process_time()
                for answer in answers:
                    read(answer.raise_for_status().content)
                here, scale = time.process_time() - start, 1e6 / (completions * tokens)
                size = sum(len(answer.content) for answer in answers) / (completions * tokens)
                least = found[way]
                if turn:
                    found[way] = min(least[0], spent * scale), min(least[1], here * scale), size
    return found


def _ask(client: httpx2.Client, path: str, tokens: int, number: int) -> httpx2.Response:
    sampling = {"n": GROUP, "seed": GROUP * number, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0}
    return client.post(path, json={"token_ids": [3, 4, 5], "sampling_params": {**sampling, "detokenize": False}})


def _read_json(answer: bytes) -> list[Any]:
    choices = json.loads(answer)["choices"]
    return [(each["token_ids"], [token["logprob"] for token in each["logprobs"]["content"]]) for each in choices]


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _wait(client: httpx2.Client) -> None:
    while True:
        try:
            client.get("/health").raise_for_status()
            return
        except httpx2.HTTPError:
            time.sleep(1)


if __name__ == "__main__":
    main()
