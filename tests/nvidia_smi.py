"""An nvidia-smi that answers as NVIDIA's does, for GPUs that are not there."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.quick_python import BY_SHELL

# `--query-gpu` with one line per GPU, `-L` with the slices of those that are divided; writes down each question.
PROGRAM = """import json, sys, time
from pathlib import Path
given = json.loads(Path(__file__).with_name("gpus.json").read_text())
with open(given["asked"], "a") as asked:
    print(*sys.argv[1:], file=asked)
time.sleep(given["seconds"])
print(given["first"], end="")
[question, *_] = sys.argv[1:]
fields = question.removeprefix("--query-gpu=").split(",")
for gpu in given["gpus"]:
    if question == "-L":
        print(f"GPU {{gpu['index']}}: {{gpu['name']}} (UUID: {{gpu['uuid']}})")
        for number, (profile, uuid) in enumerate(gpu["slices"]):
            print(f"  MIG {{profile:11}} Device  {{number}}: (UUID: {{uuid}})")
        continue
    if unknown := [field for field in fields if field not in gpu]:
        print(f'Field "{{unknown[0]}}" is not a valid field to query.')
        sys.exit(2)
    print(", ".join(gpu[field] for field in fields))
sys.exit(given["status"])
"""
H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "memory.total": "81559",
    "memory.used": "4",
    "compute_cap": "9.0",
    "driver_version": "580.65.06",
    "mig.mode.current": "Disabled",
    "slices": [],
}
LOST = "Unable to determine the device handle for GPU0000:BA:00.0: Unknown Error\n"  # one has fallen off the bus
Gpu = dict[str, object]


def put_nvidia_smi(
    folder: Path, gpus: Sequence[Gpu] | int, *, first: str = "", status: int = 0, seconds: float = 0.0
) -> Path:
    """Put nvidia-smi into the folder, which belongs on PATH, and a C compiler, without which a PyTorch that is built
    for CUDA is refused there; returns the file with the questions that nvidia-smi is asked. `gpus`:
    what differs from an idle H100 (None: a field that its driver does not know), or how many of these; `first`: what it
    prints before; `seconds`: what it takes."""
    listed = [{}] * gpus if isinstance(gpus, int) else gpus
    every = [H100 | {"index": str(number), "uuid": f"GPU-{number}a6e"} | gpu for number, gpu in enumerate(listed)]
    known = [{name: value for name, value in gpu.items() if value is not None} for gpu in every]
    given = {"gpus": known, "first": first, "status": status, "seconds": seconds, "asked": str(folder / "asked")}
    (folder / "gpus.json").write_text(json.dumps(given))
    (folder / "nvidia-smi").write_text(BY_SHELL.format(python=sys.executable) + PROGRAM.format())
    (folder / "nvidia-smi").chmod(0o755)
    if not (compiler := folder / "gcc").exists():
        compiler.symlink_to("/bin/true")
    return folder / "asked"
