"""`grpo keys`: the configuration's keys."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from grpo_core.config.files import describe_keys


def keys() -> None:
    """List every configuration key: default, bounds or choices, meaning."""
    console = Console()
    for key, default, accepts, meaning in describe_keys():
        console.print(f"{key} = {default or '(none)'}   [{accepts}]", style="bold", markup=False, highlight=False)
        console.print(Padding(Text(meaning), (0, 0, 0, 4)))
