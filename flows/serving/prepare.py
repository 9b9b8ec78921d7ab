"""`python -m flows.serving.prepare`: what a machine's and a storage's first run does once: compiled Python modules, and
the databases of Prefect and MLflow."""

from __future__ import annotations

import importlib

from flows.serving.environment import configure
from flows.serving.find_server import server_for_command

IMPORTED = ("flows.pipeline", "grpo_core.train", "grpo_core.evaluate", "mlflow.transformers")


def main() -> None:
    configure()
    with server_for_command():
        from tasks.tracking.runs import connect

        connect()
        for module in IMPORTED:
            importlib.import_module(module)


if __name__ == "__main__":
    main()
