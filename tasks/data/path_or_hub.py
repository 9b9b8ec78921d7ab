"""Sources of models and data: a path on this machine, or a name on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from grpo_core.config.run import RunConfig
from grpo_core.config.teacher import loaded_teachers
from grpo_core.data.teacher import check_teacher
from grpo_core.errors import ConfigError
from grpo_core.planning.adapter import check_adapter

LONGEST_HUB_NAME = 96  # characters, by the hub's rule
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
is_file, is_folder = os.path.isfile, os.path.isdir  # False for a name too long for any file, at which Path's raise
FILE_NAME = re.compile(r"\.(parquet|jsonl?|ndjson|csv|tsv|txt|arrow|xlsx?|gz|bz2|xz|zst|zip)$", re.IGNORECASE)


def data_set(part: str) -> str:
    """Data set that a part belongs to: train, eval or eval-NAME."""
    return part.partition("/")[0]


def may_be_on_the_hub(source: str) -> bool:
    """True if a name that is not a path here could be a name on the hub: NAME or OWNER/NAME, and unlike a file's."""
    owner, separator, _ = source.partition("/")
    here = bool(separator) and is_folder(Path(owner))
    named = len(source) <= LONGEST_HUB_NAME and HUB_NAME.fullmatch(source) is not None
    return named and FILE_NAME.search(source) is None and not here


def check_places(config: RunConfig) -> None:
    """Raises ConfigError if a model or a source of prompts is neither a path here nor a possible name on the hub, or if
    the adapter to continue from or a teacher does not match the configuration."""
    places = {
        "model.name_or_path": config.model.name_or_path,
        **{key: teacher.name_or_path for key, teacher in loaded_teachers(config).items()},
        **({} if (given := config.warm_start.source) is None else {"warm_start.demonstrations": given}),
        **{
            f"{key}.{name}": getattr(each, name)
            for key, each in config.data.origins.items()
            for name in ("train", "eval")
        },
        **{f"evaluation.sets.{number}.data": each.data for number, each in enumerate(config.evaluation.sets)},
    }
    missing = [
        f"{key} = {source!r}: {_why_not_there(Path(source))}, and not a possible name on the hub"
        for key, source in places.items()
        if not may_be_on_the_hub(source) and not (is_file(Path(source)) or is_folder(Path(source)))
    ]
    if missing:
        raise ConfigError("\n".join(missing))
    check_adapter(config.model)
    check_teacher(config, config.rollout.max_completion_length + 1)


def _why_not_there(path: Path) -> str:
    if os.path.lexists(path):
        return "a pipe, a device or a link to nothing"
    return f"no such file or folder (looked in {Path.cwd()})"
