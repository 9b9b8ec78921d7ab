"""Other systems' recipes as plan inputs: TRL's and Open-R1's YAML, ms-swift's files of arguments, launch scripts.

Each has that system's own defaults: TRL 1.16 (transformers 5.19), TRL 0.17 and 0.16 (transformers 4.50), ms-swift 4.6.
Values that a plan does not depend on are ignored.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from grpo_core.planning.frameworks.launches import (
    VERL_PAGE,
    Launch,
    RecipeError,
    beside,
    launches,
    processes,
    read_yaml,
    trains_by_rloo,
    why_not_grpo,
)
from grpo_core.planning.frameworks.legacy_trl import LEGACY
from grpo_core.planning.frameworks.megatron import MEGATRON_KEYS, POSITIVE, MegatronInputs
from grpo_core.planning.rules import PlanInputs, Rules

System = Literal["trl", "swift"]
Algorithm = Literal["grpo", "rloo", "megatron"]
SCRIPTS = (".sh", ".bash", ".slurm")
RECIPES = (*SCRIPTS, ".yaml", ".yml", ".json")
CODE = {".ipynb": "notebook", ".py": "Python file"}
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
    "swift-4.6": COMMON
    | {"max_completion_length": 512, "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1},
}
WHOLE_NUMBERS = (
    "num_generations",
    "per_device_train_batch_size",
    "max_completion_length",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
    "num_iterations",
)
NOT_MEGATRON = {
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "max_steps",
    "warmup_steps",
    "warmup_ratio",
}
# Of a recipe: `num_prompts` and `world_size` follow from data and launch.
MEGATRON_WHOLE_NUMBERS = sorted(
    POSITIVE - {"num_prompts", "world_size"} | {"num_iterations", "lr_warmup_iters", "max_resample_times"}
)
RLOO = {"num_generations": 2}  # defaults of TRL's RLOOConfig that differ from GRPOConfig's and that a plan depends on
OPTIONS = {  # of `grpo plan`, that replace a recipe's value
    *WHOLE_NUMBERS,
    *("num_train_epochs", "max_steps", "warmup_steps"),
    *("per_device_eval_batch_size", "num_generations_eval", "num_eval_prompts"),
}
KNOWN = {*OPTIONS, *MEGATRON_WHOLE_NUMBERS, "warmup_ratio", "lr_warmup_fraction", "split_dataset_ratio"}
SAYS_RECIPE = {
    *KNOWN,
    "rlhf_type",
    "model",
    "model_name_or_path",
    "dataset",
    "datasets",
    "dataset_name",
    "output_dir",
    "train",
}
PROCESSES = ("global_world_size", "num_processes", "NPROC_PER_NODE", "NNODES", "train.gpus")
NO = ("no", False)  # YAML reads a bare `no` as false


@dataclass(frozen=True)
class Recipe:
    """A recipe's arguments, by name. `processes`: numbers whose product is the number of processes; empty if unknown.

    `algorithm`: "megatron" is GRPO in Megatron-SWIFT, which has its own arithmetic.
    """

    rules: Rules
    arguments: Mapping[str, Any]
    processes: Mapping[str, Any] = field(default_factory=dict)
    algorithm: Algorithm = "grpo"
    notes: tuple[str, ...] = ()

    @property
    def datasets(self) -> list[str]:
        """Files, folders or hub names of the training data; ms-swift's may end in #ROWS."""
        if self.rules == "swift-4.6":
            given = self.arguments.get("dataset")
        else:
            given = self.arguments.get("dataset_name") or self.arguments.get("datasets")
        named = given if isinstance(given, list) else [given or []]
        return [str(one.get("path") if isinstance(one, dict) else one) for one in named if one]

    @property
    def split(self) -> str:
        return str(self.arguments.get("dataset_train_split", "train"))


def read_recipe(path: Path, rules: Rules) -> Recipe:
    """Read a YAML or JSON file of arguments, or a shell script that launches a training. Raises RecipeError for any
    other file."""
    check_no_code(path, rules)
    if path.suffix in SCRIPTS:
        return _launched(path, _text(path), rules)
    arguments = _mapping(path)
    environment = arguments.get("ENV")  # of ms-swift
    if not (SAYS_RECIPE | {*PROCESSES}) & arguments.keys():
        verl = f", but of verl, whose files are not read ({VERL_PAGE})" if "actor_rollout_ref" in arguments else ""
        raise RecipeError(
            f"{path}: is no recipe of TRL, Open-R1 or ms-swift{verl}: of the keys that a plan follows from, such as "
            f"num_generations or max_steps, it has none{_misspelt(arguments)}; it has {_listed(arguments)}"
        )
    launch = Launch("", {}, {}, environment if isinstance(environment, dict) else {}, is_whole=True)
    if rules == "swift-4.6" and arguments.get("rlhf_type", "grpo") != "grpo":
        raise RecipeError(f"{path}: rlhf_type is {arguments['rlhf_type']}: this does not train by GRPO")
    return _recipe(rules, launch, arguments, path.parent)


def check_no_code(path: Path, rules: Rules) -> None:
    """Raises RecipeError for a notebook and a Python file."""
    if path.suffix in CODE:
        raise RecipeError(
            f"{path}: the code of a {CODE[path.suffix]} is not read; give its settings as options instead of the file: "
            f"grpo plan --rules {rules} --num-prompts N --per-device-train-batch-size b --num-generations G, and so on"
        )


def _launched(path: Path, text: str, rules: Rules) -> Recipe:
    """The recipe of the script's first command that trains by GRPO."""
    reasons: list[str] = []
    for launch in launches(text):
        arguments = {**_config(launch, path), **launch.arguments}
        reason = why_not_grpo(launch, arguments, rules.partition("-")[0], path.parent)
        if reason is None:
            return _recipe(rules, launch, arguments, path.parent)
        reasons += [reason] if reason not in reasons else []
    found = "; ".join(reasons) or "none of its commands starts a program of TRL or ms-swift, or a Python file"
    raise RecipeError(f"the script launches no training by GRPO that can be planned: {found}")


def _config(launch: Launch, script: Path) -> dict[str, Any]:
    """Arguments in the file that `--config` names; empty for a server."""
    name = launch.arguments.get("config")
    if not name or why_not_grpo(launch, {"rlhf_type": "grpo", **launch.arguments}, _owner(launch), script.parent):
        return {}
    path = beside(str(name), script.parent)
    if path is None:
        raise RecipeError(f"--config {name}: there is no such file, neither beside {script} nor in the working folder")
    return _mapping(path)


def _owner(launch: Launch) -> str:
    return "swift" if launch.program.startswith(("swift ", "megatron ")) else "trl"


def _recipe(rules: Rules, launch: Launch, arguments: dict[str, Any], folder: Path) -> Recipe:
    """The recipe of a launch; Ray's file of roles holds what trains, and on how many GPUs, under `train`."""
    notes: tuple[str, ...] = ()
    if misspelt := _misspelt(arguments):
        raise RecipeError(f"the recipe has keys that are almost those that a plan follows from{misspelt}")
    if launch.program.endswith(".py"):
        notes = (f"only the arguments of {launch.program} are read; values that its code sets are not known",)
    if isinstance(role := arguments.get("train"), dict):
        if "gpus" not in role:
            raise RecipeError("train.gpus is not given: Ray starts one training process per GPU of it")
        ray = {**arguments, **role, "use_ray": True}
        return Recipe(rules, ray, {"train.gpus": role["gpus"]}, "megatron", notes)
    algorithm: Algorithm = "grpo"
    if rules == "swift-4.6" and (launch.program == "megatron rlhf" or MEGATRON_KEYS & arguments.keys()):
        algorithm = "megatron"
    elif trains_by_rloo(launch, folder):
        algorithm = "rloo"
    return Recipe(rules, arguments, processes(launch, arguments, folder), algorithm, notes)


def _misspelt(arguments: Mapping[str, Any]) -> str:
    """End of a sentence: keys that are almost known ones, with these; "" if there are none."""
    unknown = (key for key in arguments if key not in KNOWN)
    near = {key: difflib.get_close_matches(key, KNOWN, n=1, cutoff=0.9) for key in unknown}
    meant = [f"for {key!r} write {names[0]!r}" for key, names in near.items() if names]
    return f" ({', '.join(meant)})" if meant else ""


def _listed(arguments: Mapping[str, Any]) -> str:
    names = [*arguments]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "no key at all"


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _mapping(path: Path) -> dict[str, Any]:
    """The arguments in a YAML or JSON file."""
    text = _text(path)
    try:
        arguments = json.loads(text) if path.suffix == ".json" else read_yaml(text)
    except (ValueError, RecursionError) as error:
        raise RecipeError(
            f"{path}: a recipe is YAML, JSON (.json) or a launch script (.sh); this is none of them: {error}"
        ) from error
    if not isinstance(arguments, dict):
        raise RecipeError(f"{path}: holds {type(arguments).__name__}, not arguments by name")
    return {str(name): value for name, value in arguments.items()}


def recipe_inputs(recipe: Recipe, rows: Sequence[int | None], given: Mapping[str, Any]) -> PlanInputs:
    """The plan's inputs: values `given` by hand, else the recipe's, else the system's defaults.

    `rows`: number of rows per data set, before ms-swift splits held-out ones off; None if unknown, unless ms-swift's
    `#ROWS` gives it.
    """
    arguments = {**DEFAULTS[recipe.rules], **(RLOO if recipe.algorithm == "rloo" else {})}
    arguments |= {name: value for name, value in {**recipe.arguments, **given}.items() if value is not None}
    if "warmup_steps" in given:
        arguments.pop("warmup_ratio", None)
    held_out = _whole_number("num_eval_prompts", arguments)
    evaluates = arguments.get("eval_strategy", arguments.get("evaluation_strategy", "no")) not in NO
    ratio = 0.0
    if recipe.rules == "swift-4.6":
        ratio = _swift_ratio(arguments)
        evaluates = ratio > 0 or (evaluates and bool(arguments.get("val_dataset")))
    num_prompts, split_off = _prompts(recipe, rows, given, ratio)
    max_steps = _whole_number("max_steps", arguments)
    dynamic = recipe.rules == "swift-4.6" and _is_true(arguments.get("dynamic_sample"))
    teacher = arguments.get("teacher_model") or arguments.get("teacher_model_server")
    return LEGACY.get(recipe.rules, PlanInputs)(
        num_prompts=num_prompts,
        **{key: _whole_number(key, arguments) for key in WHOLE_NUMBERS},
        num_processes=_processes(recipe, given),
        num_train_epochs=_number("num_train_epochs", arguments),
        max_steps=None if max_steps == -1 else max_steps,
        warmup_steps=_warmup(arguments, recipe.rules),
        dynamic_sample=dynamic,
        max_resample_times=_whole_number("max_resample_times", {"max_resample_times": 3, **arguments})
        if dynamic
        else 0,
        rules=recipe.rules,
        has_teacher=recipe.rules == "swift-4.6" and bool(teacher),
        per_device_eval_batch_size=_whole_number("per_device_eval_batch_size", arguments) if evaluates else None,
        num_generations_eval=_whole_number("num_generations_eval", arguments) if evaluates else None,
        num_eval_prompts=(split_off or held_out) if evaluates else None,
    )


def megatron_inputs(recipe: Recipe, rows: Sequence[int | None], given: Mapping[str, Any]) -> MegatronInputs:
    """The plan's inputs for Megatron-SWIFT, in its own terms. Raises RecipeError for settings that it does not have."""
    arguments = {name: value for name, value in {**recipe.arguments, **given}.items() if value is not None}
    if foreign := sorted(NOT_MEGATRON & arguments.keys()):
        raise RecipeError(
            f"Megatron-SWIFT has no {', '.join(foreign)}: its batches follow from micro_batch_size and "
            "global_batch_size, its length from num_train_epochs or train_iters"
        )
    ray = _is_true(arguments.get("use_ray"))
    num_prompts, _ = _prompts(recipe, rows, given, 0.0 if ray else _swift_ratio(arguments))
    known = {name: _whole_number(name, arguments) for name in MEGATRON_WHOLE_NUMBERS if name in arguments}
    return MegatronInputs(
        num_prompts=num_prompts,
        world_size=_processes(recipe, given),
        **known,
        lr_warmup_fraction=_number("lr_warmup_fraction", arguments) if "lr_warmup_fraction" in arguments else None,
        dynamic_sample=_is_true(arguments.get("dynamic_sample")),
        has_group_loss=arguments.get("loss_type") == "real",
        ray=ray,
    )


def _is_true(value: Any) -> bool:
    """True if a switch is on; given without a value, it is."""
    return value == [] or str(value).lower() == "true"


def _prompts(recipe: Recipe, rows: Sequence[int | None], given: Mapping[str, Any], ratio: float) -> tuple[int, int]:
    """Training and held-out prompts. `num_prompts` by hand replaces all data sets and their #ROWS."""
    if "num_prompts" in given:
        return _split([""], [given["num_prompts"]], ratio)
    return _split(recipe.datasets or [""], rows, ratio)


def _processes(recipe: Recipe, given: Mapping[str, Any]) -> int:
    if "num_processes" in given:
        return given["num_processes"]
    return math.prod(_whole_number(name, recipe.processes) for name in recipe.processes)


def _warmup(arguments: Mapping[str, Any], rules: Rules) -> float:
    """Warm-up in steps, or, below 1, as the fraction of them that warmup_ratio gives; ms-swift does not take both."""
    steps, ratio = (_number(key, {key: 0, **arguments}) for key in ("warmup_steps", "warmup_ratio"))
    if steps and ratio and rules == "swift-4.6":
        raise RecipeError(f"warmup_steps={steps:g} and warmup_ratio={ratio:g} are both given; remove one")
    return steps or ratio


def _swift_ratio(arguments: Mapping[str, Any]) -> float:
    """Held-out fraction of the data; 0 if there is separate held-out data, or no evaluation."""
    if arguments.get("val_dataset") or arguments.get("eval_strategy") in NO:
        return 0.0
    ratio = _number("split_dataset_ratio", {"split_dataset_ratio": 0, **arguments})
    if not 0 <= ratio < 1:
        raise RecipeError(f"split_dataset_ratio={ratio:g} is not a fraction between 0 and 1")
    return ratio


def _split(datasets: Sequence[str], rows: Sequence[int | None], ratio: float) -> tuple[int, int]:
    """Training and held-out prompts: of each data set `#ROWS`, and max(int(rows·ratio), 1) of these held out."""
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


def _whole_number(key: str, arguments: Mapping[str, Any]) -> Any:
    """The argument as a whole number; None if it is not given."""
    if key not in arguments:
        return None
    number = _number(key, arguments)
    if number != int(number):
        raise RecipeError(f"{key} = {arguments[key]!r} is not a whole number; {_instead_of(key)}")
    return int(number)


def _number(key: str, arguments: Mapping[str, Any]) -> float:
    value = arguments[key]
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise RecipeError(f"{key} = {value!r} is not a number; {_instead_of(key)}")
    return number


def _instead_of(key: str) -> str:
    """How to give a number that the recipe does not have."""
    option = "num_processes" if key in PROCESSES else "warmup_steps" if key == "warmup_ratio" else key
    if option in OPTIONS or option == "num_processes":
        return f"give --{option.replace('_', '-')}"
    return "write the number into the recipe"
