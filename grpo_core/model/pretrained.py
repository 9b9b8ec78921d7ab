"""Read models and tokenizers as data: in a terminal, transformers asks whether to run Python code beside the weights,
unless it is told that the answer is no."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def from_pretrained(kind: Any, path: Path | str, revision: str | None = None, **options: Any) -> Any:
    """Load what one of transformers' Auto classes finds in a folder or hub repository. Raises ValueError if that needs
    Python code of its own."""
    try:
        return kind.from_pretrained(path, revision=revision, trust_remote_code=False, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(f"{path} needs Python code of its own, and no code of a model runs here") from None


def from_config(kind: Any, config: Any, **options: Any) -> Any:
    """Make a model of one of transformers' Auto classes without weights of its own."""
    return kind.from_config(config, trust_remote_code=False, **options)
