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
from dataclasses import dataclass, field
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
OPERATORS = ";|&<>"
NO = ("no", False)  # YAML reads a bare `no` as false


class RecipeError(ValueError):
    """A recipe that cannot be read, or that does not say what a plan needs."""


@dataclass(frozen=True)
class Recipe:
    """A recipe's arguments, by name. `processes`: numbers whose product is that of the processes; empty if not said."""

    rules: Rules
    arguments: Mapping[str, Any]
    processes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def datasets(self) -> list[str]:
        """Files, folders or hub names of the training data; ms-swift's may end in #ROWS."""
        given = self.arguments.get("dataset" if self.rules == "swift-4.6" else "dataset_name") or []
        return [str(name) for name in given] if isinstance(given, list) else [str(given)]

    @property
    def split(self) -> str:
        return str(self.arguments.get("dataset_train_split", "train"))


def read_recipe(path: Path, rules: Rules) -> Recipe:
    """Read a YAML or JSON file of arguments, or a shell script that launches ms-swift."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if path.suffix == ".sh":
        arguments, environment = _script(text)
        said = {**environment, **{name.upper(): value for name, value in arguments.items()}}
        names = ("NPROC_PER_NODE" if "NPROC_PER_NODE" in said else "NUM_PROCESSES", "NNODES")
        return Recipe(rules, arguments, {name: said[name] for name in names if name in said})
    try:
        arguments = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise RecipeError(
            f"{path}: a recipe is YAML, JSON (.json) or a launch script (.sh); this is none of them: {error}"
        ) from error
    if not isinstance(arguments, dict):
        raise RecipeError(f"{path}: holds {type(arguments).__name__}, not arguments by name")
    size = arguments.get("global_world_size")
    return Recipe(rules, arguments, {} if size is None else {"global_world_size": size})


def recipe_inputs(recipe: Recipe, rows: Sequence[int | None], given: Mapping[str, Any]) -> PlanInputs:
    """The plan's inputs: what is `given` by hand, else what the recipe says, else the system's defaults.

    `rows`: of each of its data sets, before ms-swift splits held-out ones off; None where that is not known, and only
    ms-swift's `#ROWS` may say it.
    """
    arguments = {**DEFAULTS[recipe.rules]}
    arguments |= {name: value for name, value in {**recipe.arguments, **given}.items() if value is not None}
    held_out = _whole("num_eval_prompts", arguments)
    evaluates = arguments.get("eval_strategy", arguments.get("evaluation_strategy", "no")) not in NO
    ratio = 0.0
    if recipe.rules == "swift-4.6":
        ratio = _swift_ratio(arguments)
        evaluates = ratio > 0 or (evaluates and bool(arguments.get("val_dataset")))
    num_prompts, split_off = _split(recipe.datasets or [""], rows, ratio)
    max_steps = _whole("max_steps", arguments)
    dynamic = recipe.rules == "swift-4.6" and str(arguments.get("dynamic_sample", False)).lower() == "true"
    return PlanInputs(
        num_prompts=num_prompts,
        **{key: _whole(key, arguments) for key in WHOLE},
        num_processes=_processes(recipe, given),
        num_train_epochs=_number("num_train_epochs", arguments),
        max_steps=None if max_steps == -1 else max_steps,
        warmup_steps=_warmup(arguments, recipe.rules),
        dynamic_sample=dynamic,
        max_resample_times=_whole("max_resample_times", {"max_resample_times": 3, **arguments}) if dynamic else 0,
        rules=recipe.rules,
        per_device_eval_batch_size=_whole("per_device_eval_batch_size", arguments) if evaluates else None,
        num_generations_eval=_whole("num_generations_eval", arguments) if evaluates else None,
        num_eval_prompts=(split_off or held_out) if evaluates else None,
    )


def _processes(recipe: Recipe, given: Mapping[str, Any]) -> int:
    if "num_processes" in given:
        return given["num_processes"]
    return math.prod(_whole(name, recipe.processes) for name in recipe.processes)


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
    ratio = _number("split_dataset_ratio", {"split_dataset_ratio": 0, **arguments})
    if not 0 <= ratio < 1:
        raise RecipeError(f"split_dataset_ratio={ratio:g} is no share: it lies between 0 and 1")
    return ratio


def _split(datasets: Sequence[str], rows: Sequence[int | None], ratio: float) -> tuple[int, int]:
    """Training and held-out prompts, of each data set: `#ROWS` of it, and max(int(rows·ratio), 1) of them held out."""
    train = held_out = 0
    for name, available in zip(datasets, rows, strict=True):
        sample = re.search(r"#(\d+)$", name)
        taken = int(sample.group(1)) if sample else available
        if taken is None:
            raise RecipeError(
                f"the number of prompts is not known, since {f'{name} is not here' if name else 'no data is named'}; "
                "give it by --num-prompts"
            )
        part = max(int(min(taken, available or taken) * ratio), 1) if ratio > 0 else 0
        train, held_out = train + taken - part, held_out + part
    return train, held_out


def _script(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Arguments (`--name value…`) of a launch script's first command that has any; its environment (`NAME=value`)."""
    environment: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        arguments: dict[str, list[str]] = {}
        name = None
        for word in _words(re.sub(r"(^|\s)#.*|\s\d?>+&?\s*\S+", "", line)):  # without comment and redirections
            if set(word) <= set(OPERATORS):
                if arguments:
                    break
            elif word.startswith("--"):
                name, _, value = word[2:].partition("=")
                name = name.replace("-", "_")
                arguments[name] = [value] if value else []
            elif word.endswith(".py"):
                name = None
            elif name is not None:
                arguments[name].append(word)
            elif match := re.fullmatch(r"([A-Z_][A-Z0-9_]*)=(.*)", word):
                environment[match.group(1)] = match.group(2)
        if arguments:
            return {key: values[0] if len(values) == 1 else values for key, values in arguments.items()}, environment
    raise RecipeError("the script launches nothing with arguments (--name value)")


def _words(line: str) -> list[str]:
    words = shlex.shlex(line, posix=True, punctuation_chars=OPERATORS)
    words.whitespace_split, words.commenters = True, ""
    try:
        return list(words)
    except ValueError as error:
        raise RecipeError(f"the script cannot be read: {error}: {line}") from error


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
