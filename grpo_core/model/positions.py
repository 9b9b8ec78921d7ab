"""Length up to which a model computes a sequence in one way, whatever shares a forward pass with it."""

from __future__ import annotations

from typing import Any

from grpo_core.errors import ConfigError


def usable_positions(config: Any) -> int | None:
    """Largest number of tokens of a sequence: the model's positions, or, with RoPE of type dynamic or longrope, those
    before its frequencies change. None: no limit.

    transformers chooses such frequencies by the longest sequence of a forward pass. Beyond that length, the
    log-probabilities of one sequence would depend on the others.
    """
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]
    unchanged = [
        kind["original_max_position_embeddings"] if kind["rope_type"] == "longrope" else positions
        for kind in kinds
        if kind["rope_type"] in ("dynamic", "longrope")
    ]
    return min([bound for bound in (positions, *unchanged) if bound is not None], default=None)


def check_context(config: Any, max_length: int) -> None:
    """Raises ConfigError if the longest prompt plus completion of a run, in tokens, exceeds `usable_positions`."""
    positions = usable_positions(config)
    if positions is not None and max_length > positions:
        raise ConfigError(
            f"the longest prompt plus completion has {max_length} tokens, and the model takes {positions} (with RoPE "
            "of type dynamic or longrope: those before its frequencies change): lower max_completion_length, or leave "
            "out the longest prompts"
        )
