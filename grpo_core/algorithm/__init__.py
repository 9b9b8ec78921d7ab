"""GRPO's mathematics: advantages and losses as pure functions."""
