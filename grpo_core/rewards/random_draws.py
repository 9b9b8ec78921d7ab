"""State of the global random generators, carried between the training and the process of an isolated reward.

A function that draws random numbers thus draws the same ones in either process, also after a resume.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any


def draws_state() -> dict[str, Any]:
    """State of the random generators of Python and, if loaded, NumPy and torch (on the CPU), as values for JSON."""
    state: dict[str, Any] = {"python": random.getstate()}
    if numpy := sys.modules.get("numpy"):
        kind, key, *rest = numpy.random.get_state()
        state["numpy"] = [kind, key.tobytes().hex(), *rest]
    if torch := sys.modules.get("torch"):
        state["torch"] = torch.get_rng_state().numpy().tobytes().hex()
    return state


def set_draws_state(state: Mapping[str, Any]) -> set[str]:
    """Restore what `draws_state` returned. Returns the names of the generators that were set: torch's is left out
    if torch is not loaded, since importing it takes seconds."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "numpy" in state:
        import numpy

        kind, key, *rest = state["numpy"]
        numpy.random.set_state((kind, numpy.frombuffer(bytes.fromhex(key), dtype=numpy.uint32), *rest))
    if "torch" in state and (torch := sys.modules.get("torch")):
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
        return {*state}
    return {*state} - {"torch"}
