"""Measures what `grpo clean` frees in a storage of many nights, and how long it takes.

    python -m benchmarks.retention [--nights 200] [--output benchmarks/results]

The first night's run is a real one, by `grpo run`. The further ones are copies of its training and evaluation with
MLflow runs, traces and model versions of their own, made by the stage register. Each is a day younger than the one
before.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tomli_w

from benchmarks.command import ROOT, parse, python_path
from grpo_core.config.files import load_config
from tests.conftest import config_values, make_model, write_sums

SECONDS_PER_DAY = 86_400


def make_night(first: Path, name: str) -> None:
    """Copy the first night's run under another name, and register it."""
    from flows.stages import FLOWS
    from tasks.tracking.runs import RUN_FILE, open_tracking_run
    from tasks.tracking.traces import TRACED_FILE

    run, training = first.with_name(name), first.with_name(name) / "training"
    shutil.copytree(first, run)
    config = run / "config.toml"
    config.write_text(config.read_text().replace(f'name = "{first.name}"', f'name = "{name}"'))
    for file in (RUN_FILE, TRACED_FILE):
        (training / file).unlink(missing_ok=True)
    open_tracking_run(load_config(config), run, training)
    FLOWS["register"](name, force=True)


def bytes_of(storage: Path) -> dict[str, int]:
    """Bytes on the disk by part of the storage; what has two names counts once."""
    parts, seen = dict.fromkeys(("runs", "MLflow's artifacts", "MLflow's database", "Prefect's database"), 0), set()
    places = zip(parts, ("runs", "mlflow/artifacts", "mlflow/mlflow.db*", "prefect/prefect.db*"), strict=True)
    for part, place in places:
        for path in [it for top in storage.glob(place) for it in (top, *top.rglob("*"))]:
            if (stat := path.lstat()).st_ino not in seen:
                seen.add(stat.st_ino)
                parts[part] += 512 * stat.st_blocks
    return parts


def measure(folder: Path, nights: int, days: float) -> dict[str, object]:
    """Make the storage of nights that are some days apart, clean it twice, and return bytes, seconds and the nights
    whose runs are left."""
    storage = folder / "storage"
    os.environ |= {"GRPO_STORAGE": str(storage), "PYTHONPATH": python_path(ROOT)}
    grpo = [sys.executable, "-m", "flows.cli.main"]
    values = config_values(make_model(folder / "model"), folder)
    write_sums(folder / "train.parquet", 10, 34)
    write_sums(folder / "eval.parquet", 60, 76)
    config = folder / "config.toml"
    config.write_text(tomli_w.dumps({**values, "name": "night-0", "registry": {"model_name": "sums"}}))
    subprocess.run([*grpo, "run", str(config)], check=True)
    first = storage / "runs" / "night-0"
    from flows.serving.environment import configure
    from flows.serving.find_server import server_for_command

    configure()
    with server_for_command():
        import prefect  # noqa: F401
    for night in range(1, nights):
        make_night(first, f"night-{night}")
    for night in range(nights):
        then = time.time() - (nights - 1 - night) * days * SECONDS_PER_DAY
        run = storage / "runs" / f"night-{night}"
        for path in (run, *run.rglob("*")):
            os.utime(path, (then, then))
    found: dict[str, object] = {"nights": nights, "bytes before": bytes_of(storage)}
    for name in ("seconds", "seconds again"):
        begin = time.monotonic()
        subprocess.run([*grpo, "clean"], check=True)
        found[name] = round(time.monotonic() - begin, 1)
    found["bytes after"] = bytes_of(storage)
    found["runs after"] = sorted(int(it.name.removeprefix("night-")) for it in (storage / "runs").iterdir())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nights", type=int, default=200)
    options = parse(parser, writes=True)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), *((3, 20) if options.tiny else (options.nights, 1)))
    text = json.dumps(found, indent=1)
    (options.output / "retention.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
