"""The policy as a model: loading, one forward pass over packed rows, log-probabilities, precision."""

from __future__ import annotations

import sys
from typing import Any

from transformers.utils import is_sklearn_available

# transformers imports scikit-learn, if it finds it, for a threshold of assisted generation, which nothing here uses;
# that takes 1.2 s of CPU. It looks once, here, and finds none.
modules: dict[str, Any] = sys.modules
if "sklearn" not in modules:
    modules["sklearn"] = None
    is_sklearn_available()
    del modules["sklearn"]
