"""Process-wide settings that must stand before a library is imported: nothing reports home, less noise."""

from __future__ import annotations

import os

DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def quiet_libraries() -> None:
    """Set what the environment does not set already."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
