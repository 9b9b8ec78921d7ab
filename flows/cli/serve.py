"""`grpo serve`: offer the flows in Prefect's UI, and run here what is triggered there. `grpo worker`: run here what is
triggered in a work pool. (`grpo up` starts the servers too.) `grpo serve-model`: serve a registered model."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from flows.cli.terminal import refuse, say
from flows.serving.environment import configure
from flows.serving.find_server import find_api_to_serve
from grpo_core.system.processes import importing

KEY = "GRPO_MODEL_KEY"  # environment variable: what requests to a served model must have
LOCAL = ("127.0.0.1", "localhost", "::1")
ENDING_SECONDS = 28  # given to flow runs when serving ends: a training takes at most 20, and has to end within 30


def serve() -> None:
    """Offer the pipeline and each stage in Prefect's UI, and run here what is triggered there, until Ctrl-C."""
    _set_up()
    _exec_supervised("flows.serving.runner")


def worker(
    pool: Annotated[str, typer.Argument(help="the work pool, as in prefect.yaml")],
    limit: Annotated[int | None, typer.Option(min=1, help="concurrent flow runs; default: no limit")] = None,
) -> None:
    """Run the flow runs of a work pool of type process here, until Ctrl-C."""
    _set_up()
    most = ["--limit", str(limit)] if limit else []
    _exec_supervised("flows.serving.worker", "worker", "start", "--pool", pool, "--type", "process", *most)


def serve_model(
    model: Annotated[str, typer.Argument(metavar="MODEL@VERSION", help="a registered model, and an alias or a number")],
    vllm_options: Annotated[list[str] | None, typer.Argument(metavar="-- VLLM_OPTIONS", help="vLLM's own")] = None,
    host: Annotated[str, typer.Option(help=f"address to listen on; another one needs a key in ${KEY}")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="port to listen on")] = 8000,
    restart: Annotated[
        bool, typer.Option("--restart", help="end the old version's server before the new one starts: less memory")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="ask it held-out prompts, compare with the evaluation's answers, and end")
    ] = False,
) -> None:
    """Serve a registered version as it was evaluated, at OpenAI's addresses, until Ctrl-C: by vLLM, or without it by
    its own code, one request after the other. With an alias, the version that it names at any time: after a promotion,
    the new champion, without a lost request.

    Exit status of --check: 1 if answers differ. 2: cannot be served.
    """
    configure()
    name, _, wanted = model.rpartition("@")
    if not name:
        refuse(f"{model!r}: give a version after an @, such as {model}@champion or {model}@3")
    key = os.environ.get(KEY, "")
    if host not in LOCAL and not key:
        refuse(f"--host {host}: others can reach it there; set a key in ${KEY}, which requests then need")
    if not key.isascii():
        refuse(f"the key in ${KEY} has characters that no header can have; take letters, digits and signs of ASCII")
    own = {"--host", "--port", "--model", "--served-model-name", "--api-key"}
    if taken := own & {each.partition("=")[0] for each in vllm_options or []}:
        refuse(f"{min(taken)} after -- is not vLLM's here: {', '.join(sorted(own))} are set by grpo serve-model")
    with importing():
        from flows.serving.model_check import check_served
        from flows.serving.model_proxy import Front, serve_front
        from flows.serving.model_server import Server, Version, find_number, has_vllm, load_version, start_server
        from flows.serving.ports import refuse_taken
        from tasks.registry.judging import read_recorded
        from tasks.tracking.runs import answering, connect

    if not (by_vllm := has_vllm()) and vllm_options:
        refuse(f"{vllm_options[0]} after -- is an option of vLLM, which is not installed: leave it out")
    refuse_taken({"--port": port})
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    with answering():
        client = connect()
        first = load_version(client, name, find_number(client, name, wanted))

    def to_serve(current: Server | None) -> Version | None:
        if current is None:
            return first
        if wanted.isdigit():
            return None
        with answering():
            number = find_number(client, name, wanted)
            return None if current.version.number == number else load_version(client, name, number)

    def compare() -> None:
        with answering():
            recorded = read_recorded(client, client.get_model_version(name, first.number))
        found = check_served(url, key, first, recorded)
        for each in found.differing:
            where = f"held-out prompt {each['row']}" + (f", from token {each['token']} on" if each["token"] else "")
            say(f"{where}: served {each['served']!r}, evaluated {each['evaluated']!r}")
        text = f"{found.equal} of {found.compared} held-out prompts are answered as in the evaluation"
        text += f", {found.ties} more except for rounding" if found.ties else ""
        unknown = "; by how much the reward changes is not known, without the run's folder and rewards"
        text += unknown if found.reward_change is None else f"; the mean reward changes by {found.reward_change:.4g}"
        if found.differing:
            refuse(text, exit_status=1)
        say(text)

    front = Front(lambda version: start_server(version, vllm_options or []), to_serve, say, key, restart)
    if check:
        front.once = compare
    starting = "starting vLLM, which takes a minute" if by_vllm else "without vLLM, one request after the other"
    say(f"{url}/v1 will answer for {name}; {starting}")
    serve_front(front, host, port)


def _set_up() -> None:
    configure()
    os.environ["PREFECT_API_URL"] = find_api_to_serve()
    with importing():
        from flows.serving.server_setup import prefect_answering, set_up

    with prefect_answering():
        set_up()


def _exec_supervised(*command: str) -> None:
    """Replace this process by a supervisor that runs `python -m COMMAND`, and tells the flow runs to end before the
    command: Prefect's own runner and worker leave them running, or kill them."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the supervisor would watch a pipe there
    supervisor = [
        sys.executable,
        "-m",
        "tasks.processes.supervise",
        "--children-first",
        str(ENDING_SECONDS),
        sys.executable,
        "-m",
        *command,
    ]
    os.execv(sys.executable, supervisor)
