"""Process-wide settings, to be made before a library is imported or a process started: nothing reports home, little
noise, and no file of the working folder hides a module."""

from __future__ import annotations

import logging
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

# Loggers that warn of what nothing here uses: wherever bitsandbytes is installed it misses a faster kernel for 4 bits
# on a CPU, also in a run without it.
NOISY = ("bitsandbytes.backends.cpu.ops",)

# CPU threads that wait for each other spin for microseconds and then sleep. Spinning for milliseconds, their default,
# makes a step twenty times slower if one other process is busy; sleeping immediately makes a step 1.6 times slower on a
# quiet machine (docs/explanation/performance.md).
BRIEF_SPIN = "2000"


def quiet_libraries() -> None:
    """Set the variables that the environment has not set, and quiet noisy loggers."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", BRIEF_SPIN)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
