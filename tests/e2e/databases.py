"""Servers of the tests' own: PostgreSQL with Prefect's and MLflow's databases, and a bucket."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import boto3
import httpx2
import psycopg2

from tests.needs import PATH, needs
from tests.serving import free_ports

DEADLINE = 300.0  # of what starts
STOP_SECONDS = 120
WORD = "of-this-test"  # every password
BUCKET_KEY = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": WORD, "AWS_DEFAULT_REGION": "us-east-1"}


def environment_of(values: Mapping[str, str]) -> dict[str, str]:
    """This process's, with nothing of Prefect, MLflow or a bucket in it but what is given."""
    foreign = ("PREFECT_", "MLFLOW_", "AWS_", "GRPO_")
    return {**{key: value for key, value in os.environ.items() if not key.startswith(foreign)}, **values}


@contextmanager
def process_of(
    command: Sequence[str],
    log: Path,
    values: Mapping[str, str],
    user: int | None = None,
    stop: signal.Signals = signal.SIGTERM,
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment_of(values),
            stdout=output,
            stderr=subprocess.STDOUT,
            user=user,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.send_signal(stop)
        try:
            process.wait(timeout=STOP_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def wait_until(is_ready: Callable[[], Any], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(httpx2.HTTPError, psycopg2.OperationalError):
            if is_ready():
                return
        time.sleep(0.2)
    raise RuntimeError(f"it does not answer:\n{log.read_text()[-4000:]}")


@contextmanager
def postgres() -> Iterator[str]:
    """HOST:PORT of a PostgreSQL server with the databases prefect and mlflow, each owned by a user of its name."""
    needs("postgres")
    programs = Path(str(shutil.which("postgres", path=PATH))).parent
    user = _unprivileged()
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="postgres-") as name:  # pytest's folders are closed to another user
        folder = Path(name)
        data, log = folder / "data", folder / "log"
        (folder / "password").write_text(WORD)
        if user is not None:
            for path in (folder, folder / "password"):
                os.chown(path, user, -1)
        initdb = [programs / "initdb", "-D", data, "-U", "postgres", "--auth=scram-sha-256", "-N"]
        made = subprocess.run([*initdb, f"--pwfile={folder / 'password'}"], user=user, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
        options = ["-D", data, "-k", folder, "-h", "127.0.0.1", "-p", str(port)]
        command = [str(part) for part in (programs / "postgres", *options)]
        with process_of(command, log, {}, user, signal.SIGINT) as process:
            server = {"host": "127.0.0.1", "port": port, "password": WORD}
            wait_until(lambda: psycopg2.connect(user="postgres", **server).close() is None, process, log)
            connection = psycopg2.connect(user="postgres", **server)
            connection.autocommit = True
            with connection.cursor() as cursor:
                for database in ("prefect", "mlflow"):
                    cursor.execute(f"CREATE ROLE {database} LOGIN PASSWORD '{WORD}'")
                    cursor.execute(f"CREATE DATABASE {database} OWNER {database}")
            connection.close()
            yield f"127.0.0.1:{port}"


def _unprivileged() -> int | None:
    """Whom to run PostgreSQL as, which refuses root."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name: entry.pw_uid for entry in pwd.getpwall()}
    return known.get("postgres", known.get("nobody"))


@contextmanager
def bucket_server(url: str, log: Path) -> Iterator[None]:
    """An S3 server (moto) with the bucket of the documented environment."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", url.rpartition(":")[2]]
    with process_of(command, log, BUCKET_KEY) as process:
        wait_until(lambda: httpx2.get(url).is_success, process, log)
        s3(url).create_bucket(Bucket="grpo-artifacts")
        yield


def s3(url: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name=BUCKET_KEY["AWS_DEFAULT_REGION"],
        aws_access_key_id=BUCKET_KEY["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=BUCKET_KEY["AWS_SECRET_ACCESS_KEY"],
    )
