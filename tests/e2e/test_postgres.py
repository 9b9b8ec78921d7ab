"""The served set-up as documented: both servers on PostgreSQL with passwords, artifacts in a bucket, TLS before them.

The environment files in docs/how-to/servers and mlflow/served are what the servers and the worker run with here, with
other ports, folders and passwords.
"""

from __future__ import annotations

import json
import logging
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psycopg2
import pytest
from mlflow import MlflowClient, set_tracking_uri

from grpo_core.config.files import load_config
from tasks.stages import table
from tasks.tracking.traces import preview, send_rest_of_rollouts
from tests.conftest import small_quickstart, write_inputs
from tests.e2e.databases import (
    BUCKET_KEY,
    DEADLINE,
    WORD,
    bucket_server,
    environment_of,
    postgres,
    process_of,
    s3,
    wait_until,
)
from tests.e2e.traced import assert_traced, traces_of
from tests.hostile import EVIL
from tests.made_up import sampled, write_sampled
from tests.serving import OFFERED, Served, free_ports, prefect_server

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
READ = """
import logging
from prefect.client.orchestration import get_client
asked = []
class Said(logging.Handler):
    def emit(self, record):
        if "Another attempt" in record.getMessage():
            asked.append(record)
            print("asks again", flush=True)
logger = logging.getLogger("prefect.client")
logger.setLevel(logging.DEBUG)
logger.addHandler(Said())
with get_client(sync_client=True) as client:
    print("reads", flush=True)
    while not asked:
        client.read_flow_runs(limit=1)
"""
STAGES = [stage.name for stage in table.STAGES]


@dataclass(frozen=True)
class Servers:
    """`prefect`: its server, the client logged in; `mlflow_url`; `database` and `bucket`: URLs of what they write to;
    `worker`: the environment of a process that is to run flows."""

    prefect: Served
    mlflow_url: str
    database: str
    bucket: str
    worker: dict[str, str]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("postgres")
    (storage := folder / "storage").mkdir()
    bucket_port, mlflow_port = free_ports(2)
    bucket, mlflow_url = f"http://127.0.0.1:{bucket_port}", f"http://127.0.0.1:{mlflow_port}"
    with ExitStack() as stack:
        database = stack.enter_context(postgres())
        stack.enter_context(bucket_server(bucket, folder / "bucket.log"))
        prefect_environment = {
            **_in(folder / "prefect", _documented("docs/how-to/servers/prefect.env")),
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"postgresql+asyncpg://prefect:{WORD}@{database}/prefect",
            "PREFECT_SERVER_API_AUTH_STRING": f"grpo:{WORD}",
        }
        command = ["-m", "prefect", "server", "start", "--port"]
        prefect = stack.enter_context(prefect_server(storage, command=command, **prefect_environment))
        prefect.api.auth = ("grpo", WORD)
        mlflow_database = f"postgresql+psycopg2://mlflow:{WORD}@{database}/mlflow"
        users = (ROOT / "mlflow/served/mlflow-auth.ini").read_text()
        documented = "postgresql+psycopg2://mlflow:YOUR-SECRET@127.0.0.1:5432/mlflow"
        (folder / "mlflow-auth.ini").write_text(_replaced(users, {documented: mlflow_database}))
        mlflow_environment = {
            **_documented("mlflow/served/mlflow.env"),
            **BUCKET_KEY,
            "MLFLOW_PORT": str(mlflow_port),
            "MLFLOW_BACKEND_STORE_URI": mlflow_database,
            "MLFLOW_S3_ENDPOINT_URL": bucket,
            "MLFLOW_AUTH_CONFIG_PATH": str(folder / "mlflow-auth.ini"),
            "MLFLOW_AUTH_ADMIN_PASSWORD": WORD,
            "MLFLOW_FLASK_SERVER_SECRET_KEY": WORD,
            "MLFLOW_SERVER_ALLOWED_HOSTS": "127.0.0.1:*,localhost:*",
            "MLFLOW_WORKERS": "1",
        }
        command = [sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth"]
        process = stack.enter_context(process_of(command, folder / "mlflow.log", mlflow_environment))
        wait_until(lambda: httpx2.get(f"{mlflow_url}/health").is_success, process, folder / "mlflow.log")
        user = {"username": "grpo", "password": WORD}
        create = f"{mlflow_url}/api/2.0/mlflow/users/create"
        httpx2.post(create, json=user, auth=("admin", WORD), timeout=DEADLINE).raise_for_status()
        worker = {
            **_documented("docs/how-to/servers/worker.env"),
            "PREFECT_API_URL": f"{prefect.prefect_url}/api",
            "PREFECT_API_AUTH_STRING": f"grpo:{WORD}",
            "MLFLOW_TRACKING_URI": mlflow_url,
            "MLFLOW_TRACKING_PASSWORD": WORD,
            "GRPO_STORAGE": str(storage),
            "PREFECT_HOME": str(folder / "worker"),
        }
        yield Servers(prefect, mlflow_url, database, bucket, worker)


@pytest.fixture(scope="module")
def registered(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was triggered by the API, with `grpo serve` as its worker."""
    inputs = tmp_path_factory.mktemp("inputs")
    changes = small_quickstart("small", write_inputs(inputs), {"max_steps": 4, "save_steps": 2})
    with _serving(servers.worker, inputs / "serve.log", servers.prefect):
        run_id = servers.prefect.trigger("pipeline/local", preset="quickstart", changes=changes)
        run = servers.prefect.wait(run_id)
        assert run["state_type"] == "COMPLETED", servers.prefect.messages(run_id)
        assert servers.prefect.tasks(run_id, 5) == [(stage, "Completed") for stage in STAGES]
    return servers.prefect.storage / "runs" / "small"


def test_a_triggered_run_is_in_both_databases_and_its_model_in_the_bucket(servers: Servers, registered: Path) -> None:
    assert _rows(servers, "prefect", "SELECT state_type FROM flow_run") == [("COMPLETED",)]
    assert _rows(servers, "mlflow", "SELECT name, version FROM model_versions") == [("arithmetic", 1)]
    [(steps,)] = _rows(servers, "mlflow", "SELECT count(*) FROM metrics WHERE key = 'reward'")
    assert steps == 4
    stored = s3(servers.bucket).list_objects_v2(Bucket="grpo-artifacts")["Contents"]
    assert any(found["Key"].endswith("model.safetensors") for found in stored)


def test_the_registered_model_is_fetched_through_the_tracking_server(
    servers: Servers, registered: Path, tmp_path: Path
) -> None:
    """With the password of MLflow alone: a client has no key of the bucket."""
    fetch = "import mlflow, sys; mlflow.artifacts.download_artifacts('models:/arithmetic/1', dst_path=sys.argv[1])"
    subprocess.run([sys.executable, "-c", fetch, str(tmp_path)], env=environment_of(servers.worker), check=True)
    [weights] = tmp_path.rglob("model.safetensors")
    assert weights.read_bytes() == (registered / "training" / "model" / "model.safetensors").read_bytes()


def test_traces_are_in_the_database_once_and_hostile_texts_too(
    servers: Servers, registered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent through the server by the workers' user; PostgreSQL takes no NUL in a text."""
    for name, value in servers.worker.items():
        monkeypatch.setenv(name, value)
    set_tracking_uri(servers.mlflow_url)
    assert_traced(registered)
    tracked = json.loads((registered / "training" / "mlflow.json").read_text())
    once = [trace.to_dict() for trace in traces_of(tracked)]
    config = load_config(registered / "config.toml")
    (registered / "training" / "mlflow_traced").unlink()
    send_rest_of_rollouts(tracked, registered / "training", config, logging.getLogger())
    assert [trace.to_dict() for trace in traces_of(tracked)] == once
    info = MlflowClient().create_run(tracked["experiment_id"]).info
    hostile = {"run_id": info.run_id, "experiment_id": tracked["experiment_id"]}
    texts = [*EVIL, "\x1b" * 900]  # each is written as four characters
    batches = [
        [sampled(1, row, {"numeric_match": 0.0}, prompt=text, completion=text) for _ in range(2)]
        for row, text in enumerate(texts)
    ]
    write_sampled(tmp_path, batches, 2)
    send_rest_of_rollouts(hostile, tmp_path, config, logging.getLogger())
    found = {trace.info.tags["row"]: trace.info for trace in traces_of(hostile)}
    assert [found[str(row)].response_preview for row in range(len(texts))] == [preview(it) for it in texts]
    set_tracking_uri(None)


def test_any_number_of_promotions_and_rollbacks_fits_the_database(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL refuses a value that is longer than its column, where SQLite takes it."""
    from tasks.registry.champion import promote, rollback
    from tasks.tracking.runs import connect

    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"postgresql+psycopg2://mlflow@{servers.database}/mlflow")
    monkeypatch.setenv("PGPASSWORD", WORD)
    client = connect()
    client.create_registered_model("often")
    champions = [str(client.create_model_version("often", str(tmp_path)).version) for _ in range(200)]
    for version in champions:
        assert promote("often", version, force=True).decision == "forced"
    for left, version in zip(champions[::-1], champions[-2:-52:-1], strict=False):
        assert rollback("often") == (left, version)
    assert str(client.get_registered_model("often").aliases["champion"]) == champions[-51]
    [(width,)] = _rows(
        servers,
        "mlflow",
        "SELECT character_maximum_length FROM information_schema.columns "
        "WHERE table_name = 'registered_model_tags' AND column_name = 'value'",
    )
    tag = client.get_registered_model("often").tags["champion.history"]
    assert width - 100 < len(tag) <= width
    set_tracking_uri(None)


def test_who_has_no_password_is_refused(servers: Servers, registered: Path) -> None:
    model = json.loads((registered / "registration.json").read_text())["mlflow_run_id"]
    for auth in (None, ("grpo", "wrong")):
        for method, url in [
            ("POST", f"{servers.prefect.prefect_url}/api/flow_runs/filter"),
            ("GET", f"{servers.prefect.prefect_url}/api/admin/settings"),
            ("GET", f"{servers.mlflow_url}/api/2.0/mlflow/experiments/search?max_results=1"),
            ("GET", f"{servers.mlflow_url}/api/2.0/mlflow/runs/get?run_id={model}"),
            ("GET", f"{servers.mlflow_url}/api/2.0/mlflow-artifacts/artifacts"),
        ]:
            assert httpx2.request(method, url, auth=auth, timeout=DEADLINE).status_code == 401, url


def test_only_prefects_own_page_may_call_its_api_from_a_browser(servers: Servers) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for origin, status in (("https://prefect.internal", 200), ("https://evil.example", 400)):
        answer = servers.prefect.api.options("/deployments/", headers={**asks, "Origin": origin})
        assert answer.status_code == status, origin


@pytest.mark.needs("nginx")
def test_a_stage_runs_with_both_servers_behind_nginx(servers: Servers, registered: Path, tmp_path: Path) -> None:
    """With a certificate of its own; task runs reach Prefect over a websocket alone."""
    ports = free_ports(3)
    certificate, key = tmp_path / "grpo.pem", tmp_path / "grpo.key"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-nodes", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", *files, *names], check=True, capture_output=True)
    listens = "listen 443 ssl;\n    server_name "
    site = _replaced(
        (ROOT / "docs/how-to/servers/nginx.conf").read_text(),
        {
            "listen 443 ssl default_server;": f"listen 127.0.0.1:{ports[2]} ssl;",
            f"{listens}prefect.internal;": f"listen 127.0.0.1:{ports[0]} ssl;",
            f"{listens}mlflow.internal;": f"listen 127.0.0.1:{ports[1]} ssl;",
            "/etc/ssl/grpo.pem": str(certificate),
            "/etc/ssl/grpo.key": str(key),
            "http://127.0.0.1:4200": servers.prefect.prefect_url,
            "http://127.0.0.1:5000": servers.mlflow_url,
        },
    )
    folders = "".join(
        f"{kind}_temp_path {tmp_path / kind};\n" for kind in ("client_body", "proxy", "fastcgi", "scgi", "uwsgi")
    )
    user = pwd.getpwuid(os.geteuid()).pw_name
    main = f"daemon off;\nuser {user};\npid {tmp_path / 'pid'};\nerror_log stderr;\nevents {{}}\n"
    (tmp_path / "nginx.conf").write_text(f"{main}http {{\naccess_log off;\n{folders}{site}}}\n")
    https = {
        **servers.worker,
        "PREFECT_API_URL": f"https://localhost:{ports[0]}/api",
        "MLFLOW_TRACKING_URI": f"https://localhost:{ports[1]}",
        "PREFECT_API_SSL_CERT_FILE": str(certificate),
        "MLFLOW_TRACKING_SERVER_CERT_PATH": str(certificate),
    }
    command = ["nginx", "-c", str(tmp_path / "nginx.conf")]
    with process_of(command, tmp_path / "nginx.log", {}), _serving(https, tmp_path / "serve.log", servers.prefect):
        run_id = servers.prefect.trigger("register/local", run="small", force=True)
        run = servers.prefect.wait(run_id)
        assert run["state_type"] == "COMPLETED", servers.prefect.messages(run_id)
        assert servers.prefect.tasks(run_id, 1) == [("register", "Completed")]
    assert json.loads((registered / "registration.json").read_text())["version"] == "2"


def test_a_client_waits_while_postgresql_takes_no_connections(servers: Servers, tmp_path: Path) -> None:
    """As while it restarts: Prefect's server answers 500 then."""
    end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'prefect'"
    allow = "ALTER DATABASE prefect ALLOW_CONNECTIONS {}"
    command = [sys.executable, "-c", READ]
    connection = psycopg2.connect(f"postgresql://postgres:{WORD}@{servers.database}/postgres")
    connection.autocommit = True
    with connection.cursor() as cursor, process_of(command, log := tmp_path / "log", servers.worker) as process:
        wait_until(lambda: "reads" in log.read_text(), process, log)
        cursor.execute(allow.format("false"))
        cursor.execute(end)
        try:
            assert servers.prefect.api.post("/flow_runs/count", json={}).status_code == 500
            wait_until(lambda: "asks again" in log.read_text(), process, log)
        finally:
            cursor.execute(allow.format("true"))
        assert process.wait(DEADLINE) == 0, log.read_text()
    connection.close()


def _documented(file: str) -> dict[str, str]:
    """The variables of an environment file."""
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def _in(home: Path, documented: Mapping[str, str]) -> dict[str, str]:
    """The variables with another folder for the documented home of the Prefect server."""
    return {name: value.replace(documented["PREFECT_HOME"], str(home)) for name, value in documented.items()}


def _replaced(text: str, changes: Mapping[str, str]) -> str:
    for documented, here in changes.items():
        assert documented in text, documented
        text = text.replace(documented, here)
    return text


@contextmanager
def _serving(worker: Mapping[str, str], log: Path, prefect: Served) -> Iterator[None]:
    """`grpo serve` until the body ends."""
    with process_of([sys.executable, "-m", "flows.cli.main", "serve"], log, worker) as process:

        def is_ready() -> bool:
            is_said = "rollback/local" in log.read_text()
            return is_said and len(prefect.filter("deployments")) == OFFERED

        wait_until(is_ready, process, log)
        yield


def _rows(servers: Servers, database: str, query: str) -> list[tuple[Any, ...]]:
    connection = psycopg2.connect(f"postgresql://{database}:{WORD}@{servers.database}/{database}")
    try:
        with connection.cursor() as cursor:
            cursor.execute(query)
            return cursor.fetchall()
    finally:
        connection.close()
