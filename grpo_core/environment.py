"""Process-wide settings that must stand before a library is imported: nothing reports home, little noise."""

from __future__ import annotations

import os

DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # CPU threads that wait for each other sleep instead of spinning: beside one busy process spinning makes a training
    # step ten times slower (docs/quickstart.md has the figures).
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def quiet_libraries() -> None:
    """Set what the environment does not set already."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
