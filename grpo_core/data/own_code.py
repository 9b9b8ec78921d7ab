"""Your own functions and schema that `[data]` names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_core.config.columns import is_function
from grpo_core.config.inputs import DataConfig
from grpo_core.errors import ConfigError
from grpo_core.system import own_code


def named(config: DataConfig) -> dict[str, str]:
    """Configuration key → the `module:name` in it."""
    functions = {
        f"{key}.columns.{column}": how
        for key, origin in config.origins.items()
        for column, how in origin.columns.items()
        if is_function(how)
    }
    return functions | ({"data.schema": config.schema} if config.schema else {})


def find(key: str, name: str) -> Callable[..., Any]:
    """The function, or model, of this name. Raises ConfigError if it cannot be imported or called."""
    found = own_code.load(name, f"{key} = {name!r}", ConfigError)
    if not callable(found):
        raise ConfigError(f"{key} = {name!r} is a {type(found).__name__}, not a function")
    return found


def check(config: DataConfig) -> None:
    """Raises ConfigError if one of them is missing, as far as that is known without running its module."""
    for key, name in named(config).items():
        own_code.check_source(name, f"{key} = {name!r}", ConfigError)


def files(config: DataConfig) -> dict[str, str]:
    """The files of their modules, each with the name that it belongs to."""
    return {file: name for key, name in named(config).items() for file in own_code.files_of(name, find(key, name))}


def sources(config: DataConfig) -> dict[str, str]:
    """Hash of the source of each function or schema, by key and name."""
    return {
        f"{key} ({name})": hashlib.blake2b(
            b"".join(Path(file).read_bytes() for file in own_code.files_of(name, find(key, name))), digest_size=16
        ).hexdigest()
        for key, name in named(config).items()
    }
