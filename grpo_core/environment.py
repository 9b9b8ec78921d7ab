"""Process-wide settings that must stand before a library is imported or a process started: nothing reports home, little
noise, no module hidden by a file of the working folder."""

from __future__ import annotations

import os

DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONSAFEPATH": "1",  # no file of the working folder, such as json.py, hides a module from `python -m`
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

# CPU threads that wait for each other spin for microseconds and then sleep. Spinning for milliseconds, as they would by
# themselves, makes a step twenty times slower beside one busy process; sleeping at once makes it 1.6 times slower alone
# (docs/explanation/performance.md).
BRIEF_SPIN = "2000"


def quiet_libraries() -> None:
    """Set what the environment does not set already."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", BRIEF_SPIN)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
