"""`grpo keys`: the configuration's keys."""

from __future__ import annotations

from rich.padding import Padding

from flows.cli.terminal import Terminal
from grpo_core.config.files import describe_keys


def keys() -> None:
    """List every configuration key: default, bounds or choices, meaning."""
    terminal = Terminal()
    for key, default, accepts, meaning in describe_keys():
        terminal.print(f"{key} = {default or '(none)'}   [{accepts}]", style="bold")
        terminal.print(Padding(meaning, (0, 0, 0, 4)))
