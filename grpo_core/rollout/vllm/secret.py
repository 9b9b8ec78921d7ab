"""The secret that a vLLM server and its trainer share: the server refuses every request without it.

vLLM's own `--api-key` guards neither weights nor the workers' methods.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from grpo_core.system.addresses import key_in

SECRET = "GRPO_VLLM_SECRET"  # environment variable, of the server and of the trainer


def with_secret(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Headers of a request to a server that has the secret of this environment; none without one. Raises ConfigError
    for one that `key_in` refuses."""
    return {"Authorization": f"Bearer {secret}"} if (secret := key_in(SECRET, environment)) else {}
