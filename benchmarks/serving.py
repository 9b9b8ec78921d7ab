"""Measures what the proxy of `grpo serve-model` costs: requests to vLLM through it, beside the same ones without it.

    python -m benchmarks.serving [--rounds 15] [--tiny]

vLLM serves a random Qwen2 of six million parameters on this machine's CPU, which the proxy and the clients share. Each
round asks both, one after the other, in an order that changes: for one token, one request at a time, and for the tokens
per second of 8 clients. Writes benchmarks/results/serving.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
import numpy as np
import psutil

from benchmarks.command import ROOT, parse, python_path
from benchmarks.vs_trl import busy_share, hardware
from tests.conftest import make_model
from tests.processes import wait_for
from tests.serving import free_ports

CLIENTS, REQUESTS, TOKENS = 8, 2, 128  # of a round, per client, per request
SINGLE = 40  # requests of a round for one token
SETTINGS = {"system_prompt": "", "template": "{}", "precision": "no"}
SAMPLING = {"max_tokens": TOKENS, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop": []}
MODEL: dict[str, Any] = {"hidden_size": 320, "intermediate_size": 1280, "num_hidden_layers": 4}
MODEL |= {"num_attention_heads": 5, "num_key_value_heads": 5, "max_position_embeddings": 512}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.serving", description="What the proxy of a served model costs.")
    parser.add_argument("--rounds", type=int, default=15, help="rounds that count; one more comes before them")
    parser.add_argument("--front", nargs=2, metavar=("MODEL", "PORT"), help=argparse.SUPPRESS)
    arguments = parse(parser, writes=True)
    if arguments.front:
        serve(Path(arguments.front[0]), int(arguments.front[1]), ["--enforce-eager"] * arguments.tiny)
        return
    rounds, load = 1 if arguments.tiny else arguments.rounds, os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch, serving(Path(scratch), arguments.tiny) as (plain, proxied, proxy):
        busy = busy_share()
        found = measure(plain, proxied, proxy, rounds)
    print(
        f"one token: {found['plain_ms']:.2f} ms without the proxy, {found['added_ms']:+.2f} ms with it (the fastest "
        f"tenth {found['added_ms_of_fastest_tenth']:+.2f} ms), which computes for {found['proxy_cpu_ms']:.2f} ms per "
        f"request; {CLIENTS} clients: {found['plain_tokens_per_second']:,.0f} "
        f"tokens per second, {found['lost_share']:+.1%} lost with it (rounds {found['lost_low']:+.1%} to "
        f"{found['lost_high']:+.1%}); other processes took {busy:.0%} of the processors before"
    )
    about = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "hardware": hardware(), "load_before": load, "busy_before": busy}
    (arguments.output / "serving.json").write_text(json.dumps({**about, "rounds": rounds, **found}, indent=1) + "\n")


def serve(folder: Path, port: int, options: Sequence[str]) -> None:
    """Be the proxy of this model, whose server's address and secret are printed. `options`: vLLM's."""
    from flows.serving.model_proxy import Front, serve_front
    from flows.serving.model_server import Server, Version, start_server

    version = Version("random", "1", folder, SAMPLING, SETTINGS)

    def start(version: Version) -> Server:
        server = start_server(version, ["--max-model-len", "512", *options])
        print(server.url, server.secret, flush=True)
        return server

    serve_front(Front(start, lambda current: None if current else version, lambda text: None), "127.0.0.1", port)


@contextmanager
def serving(scratch: Path, tiny: bool) -> Iterator[tuple[httpx2.Client, httpx2.Client, psutil.Process]]:
    """Clients of the server, and of its proxy; and the proxy."""
    make_model(scratch / "model", **MODEL)
    [port] = free_ports(1)
    command = [sys.executable, "-m", "benchmarks.serving", "--front", str(scratch / "model"), str(port)]
    command += ["--tiny", "--output", str(scratch)] * tiny
    environment = {**os.environ, "GRPO_STORAGE": str(scratch), "PYTHONPATH": python_path(ROOT)}
    limits = httpx2.Limits(max_connections=CLIENTS, max_keepalive_connections=CLIENTS)
    options: dict[str, Any] = {"timeout": 600, "limits": limits, "trust_env": False}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as front:
        try:
            assert front.stdout
            url, secret = front.stdout.readline().split()
            options["headers"] = {"Authorization": f"Bearer {secret}"}
            clients = [httpx2.Client(base_url=each, **options) for each in (url, f"http://127.0.0.1:{port}")]
            with clients[0] as plain, clients[1] as proxied:
                wait_for(lambda: is_ready(proxied) or front.poll() is not None, 600)
                assert front.poll() is None
                yield plain, proxied, psutil.Process(front.pid)
        finally:
            front.terminate()


def is_ready(client: httpx2.Client) -> bool:
    try:
        return client.get("/health").is_success
    except httpx2.ConnectError:
        return False


def ask(client: httpx2.Client, tokens: int) -> None:
    asked = {**SAMPLING, "model": "random", "prompt": "12+30=", "max_tokens": tokens, "ignore_eos": True}
    usage = client.post("/v1/completions", json=asked).raise_for_status().json()["usage"]
    assert usage["completion_tokens"] == tokens


def measure(plain: httpx2.Client, proxied: httpx2.Client, proxy: psutil.Process, rounds: int) -> dict[str, float]:
    """Medians over the rounds, of which a first one does not count, and over its single requests."""
    single: dict[httpx2.Client, list[float]] = {plain: [], proxied: []}
    rates: dict[httpx2.Client, list[float]] = {plain: [], proxied: []}
    computed: list[float] = []
    with ThreadPoolExecutor(CLIENTS) as clients:
        for number in range(rounds + 1):
            order = (plain, proxied) if number % 2 else (proxied, plain)
            times: dict[httpx2.Client, list[float]] = {plain: [], proxied: []}
            before = sum(proxy.cpu_times()[:2])
            for _ in range(SINGLE):
                for client in order:
                    begun = time.perf_counter()
                    ask(client, 1)
                    times[client].append(1e3 * (time.perf_counter() - begun))
            computed.append(1e3 * (sum(proxy.cpu_times()[:2]) - before) / SINGLE)
            for client in order:
                begun = time.perf_counter()
                list(clients.map(lambda _, of=client: ask(of, TOKENS), range(CLIENTS * REQUESTS)))
                rate = CLIENTS * REQUESTS * TOKENS / (time.perf_counter() - begun)
                if number:
                    rates[client].append(rate)
                    single[client] += times[client]
    lost = 1 - np.array(rates[proxied]) / np.array(rates[plain])
    return {
        "plain_ms": median(single[plain]),
        "added_ms": float(np.median(np.array(single[proxied]) - np.array(single[plain]))),
        "added_ms_of_fastest_tenth": float(np.quantile(single[proxied], 0.1) - np.quantile(single[plain], 0.1)),
        "proxy_cpu_ms": median(computed[1:]),
        "plain_tokens_per_second": median(rates[plain]),
        "proxied_tokens_per_second": median(rates[proxied]),
        "lost_share": float(np.median(lost)),
        "lost_low": float(lost.min()),
        "lost_high": float(lost.max()),
    }


if __name__ == "__main__":
    main()
