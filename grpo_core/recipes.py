"""Other systems' recipes as plan inputs: TRL's and Open-R1's YAML, ms-swift's args.json and launch scripts.

Each with that system's own defaults: TRL 1.16 (transformers 5.19), TRL 0.17 and 0.16 (transformers 4.50), ms-swift 4.6.
Values that the plan does not follow from are passed over.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from grpo_core.rules import PlanInputs, Rules

System = Literal["trl", "swift"]
NEWEST: dict[System, Rules] = {"trl": "trl-1.16", "swift": "swift-4.6"}
COMMON = {
    "num_generations": 8,
    "gradient_accumulation_steps": 1,
    "num_iterations": 1,
    "num_train_epochs": 3.0,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "max_completion_length": 256,
}
DEFAULTS: dict[Rules, dict[str, Any]] = {
    "trl-1.16": {**COMMON, "max_completion_length": 512},
    "trl-0.17": COMMON,
    "trl-0.16": COMMON,
    "swift-4.6": {
        **COMMON,
        "max_completion_length": 512,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
    },
}
WHOLE = (
    "num_generations",
    "per_device_train_batch_size",
    "max_completion_length",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
    "num_iterations",
)
NO = ("no", False)  # YAML reads a bare `no` as false


class RecipeError(ValueError):
    """A recipe that cannot be read, or that does not say what a plan needs."""


@dataclass(frozen=True)
class Recipe:
    """A recipe's arguments, by name, and where they are silent the system's defaults. `processes`: None if not said."""

    rules: Rules
    arguments: Mapping[str, Any]
    processes: int | None = None

    @property
    def datasets(self) -> list[str]:
        """Files, folders or hub names of the training data; ms-swift's may end in #ROWS."""
        given = self.arguments.get("dataset" if self.rules == "swift-4.6" else "dataset_name") or []
        return [given] if isinstance(given, str) else list(given)

    @property
    def split(self) -> str:
        return str(self.arguments.get("dataset_train_split", "train"))


def read_recipe(path: Path, rules: Rules) -> Recipe:
    """Read a YAML or JSON file of arguments, or a shell script that launches ms-swift."""
    try:
        text = path.read_text()
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}") from error
    if path.suffix == ".sh":
        arguments, environment = _script(text)
        return Recipe(rules, arguments, _processes_of_script(arguments, environment))
    try:
        arguments = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"{path}: not valid {path.suffix.lstrip('.')}: {error}") from error
    if not isinstance(arguments, dict):
        raise RecipeError(f"{path}: holds {type(arguments).__name__}, not arguments by name")
    return Recipe(rules, arguments, arguments.get("global_world_size"))


def recipe_inputs(recipe: Recipe, num_prompts: int | None, given: Mapping[str, Any]) -> PlanInputs:
    """The plan's inputs: what is `given` by hand, else what the recipe says, else the system's defaults.

    `num_prompts`: rows of the training data, before ms-swift splits its held-out share off; None where only ms-swift's
    `#ROWS` says it.
    """
    arguments = {**DEFAULTS[recipe.rules]}
    arguments |= {name: value for name, value in {**recipe.arguments, **given}.items() if value is not None}
    rows, held_out = num_prompts, _whole("num_eval_prompts", arguments)
    evaluates = arguments.get("eval_strategy", arguments.get("evaluation_strategy", "no")) not in NO
    if recipe.rules == "swift-4.6":
        ratio = _swift_ratio(arguments)
        rows, split_off = _swift_split(recipe.datasets, num_prompts, ratio)
        held_out = split_off or held_out
        evaluates = ratio > 0 or (evaluates and bool(arguments.get("val_dataset")))
    if rows is None:
        raise RecipeError(
            f"the number of prompts is not known: {', '.join(recipe.datasets) or 'no dataset'} is not on this machine; "
            "give it by --num-prompts"
        )
    max_steps = _whole("max_steps", arguments)
    return PlanInputs(
        num_prompts=rows,
        **{key: _whole(key, arguments) for key in WHOLE},
        num_processes=_whole("num_processes", given) or recipe.processes or 1,
        num_train_epochs=_number("num_train_epochs", arguments),
        max_steps=max_steps if max_steps and max_steps > 0 else None,
        warmup_steps=_warmup(arguments, recipe.rules),
        rules=recipe.rules,
        per_device_eval_batch_size=_whole("per_device_eval_batch_size", arguments) if evaluates else None,
        num_generations_eval=_whole("num_generations_eval", arguments) if evaluates else None,
        num_eval_prompts=held_out if evaluates else None,
    )


def _warmup(arguments: Mapping[str, Any], rules: Rules) -> float:
    """Steps, or below 1 the share of them that warmup_ratio gives; ms-swift does not take both."""
    steps, ratio = (_number(key, {key: 0, **arguments}) for key in ("warmup_steps", "warmup_ratio"))
    if steps and ratio and rules == "swift-4.6":
        raise RecipeError(f"warmup_steps={steps:g} and warmup_ratio={ratio:g} are both given; remove one")
    return steps or ratio


def _swift_ratio(arguments: Mapping[str, Any]) -> float:
    """Held-out share of the data; held-out data of its own, or no evaluation, makes it 0."""
    if arguments.get("val_dataset") or arguments.get("eval_strategy") in NO:
        return 0.0
    return _number("split_dataset_ratio", {"split_dataset_ratio": 0, **arguments})


def _swift_split(datasets: Sequence[str], rows: int | None, ratio: float) -> tuple[int | None, int]:
    """Training and held-out prompts: of each data set `#ROWS` are taken, max(int(rows·ratio), 1) of them held out."""
    sampled = [re.search(r"#(\d+)$", name) for name in datasets]
    if sampled and all(sampled):
        taken = [int(match.group(1)) for match in sampled if match]
    elif rows is not None:
        taken = [rows]
    else:
        return None, 0
    available = [min(rows, taken[0])] if rows is not None and len(taken) == 1 else taken
    held_out = [max(int(n * ratio), 1) if ratio > 0 else 0 for n in available]
    return sum(taken) - sum(held_out), sum(held_out)


def _script(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Arguments (`--name value…`) and environment (`NAME=value`) of a launch script."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise RecipeError(f"the script cannot be read: {error}") from error
    environment = {m.group(1): m.group(2) for word in words if (m := re.fullmatch(r"([A-Z_][A-Z0-9_]*)=(.*)", word))}
    arguments: dict[str, list[str]] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            arguments[name] = [value] if value else []
        elif name is not None:
            arguments[name].append(word)
    return {key: values[0] if len(values) == 1 else values for key, values in arguments.items()}, environment


def _processes_of_script(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> int | None:
    """Processes of all nodes, as NPROC_PER_NODE and NNODES or torchrun's arguments say."""
    each = environment.get("NPROC_PER_NODE") or arguments.get("nproc_per_node") or arguments.get("num_processes")
    nodes = environment.get("NNODES") or arguments.get("nnodes") or 1
    return int(each) * int(nodes) if each else None


def _whole(key: str, arguments: Mapping[str, Any]) -> Any:
    """The argument as a whole number; None where it is not given."""
    if key not in arguments:
        return None
    number = _number(key, arguments)
    if number != int(number):
        raise RecipeError(f"{key} = {arguments[key]!r} is not a whole number")
    return int(number)


def _number(key: str, arguments: Mapping[str, Any]) -> float:
    value = arguments[key]
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise RecipeError(f"{key} = {value!r} is not a number")
    return number
