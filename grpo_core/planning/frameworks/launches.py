"""Finds the training that a shell script launches: the command, its arguments and its processes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_core.errors import GrpoError
from grpo_core.planning.frameworks.shell import Command, ShellError, commands

SERVERS = ("swift rollout", "swift deploy", "trl vllm-serve", "vllm serve")
TRAINERS = ("swift rlhf", "megatron rlhf", "trl grpo", "trl rloo")
TOOLS = ("swift", "megatron", "trl", "vllm")
LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
MODULES = {  # files and modules that are those tools' commands
    r"(.*[./])?_megatron[./]rlhf(\.py)?": "megatron rlhf",
    r"(.*[./])?swift[./]cli[./](\w+)(\.py)?": r"swift \2",
    r"(.*[./])?trl[./]scripts[./](\w+)(\.py)?": r"trl \2",
}
STARTERS = ("torchrun", "accelerate", "deepspeed", "python", "python3", *TOOLS)
OPEN = {"...", "$@", "$*"}
UNKNOWN = re.compile(r"\$\{?\w+(\[[@*]\])?\}?")
VERL_PAGE = "docs/how-to/from-verl.md says where its settings go"
VERL = re.compile(r"verl\b.*|recipe[./].*")
GRPO_NAME = re.compile(r"grpo|gspo|rloo", re.I)
ONLY_GRPO = {"num_generations", "steps_per_generation", "generation_batch_size"}
SETTINGS = ONLY_GRPO | {
    "config",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_iterations",
    "num_train_epochs",
    "max_steps",
    "max_completion_length",
}
TRL_CONFIGS = {"single_gpu": 1} | dict.fromkeys(("multi_gpu", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"), 8)

MAX_CHARACTERS = 1_000_000

Arguments = dict[str, Any]


class RecipeError(GrpoError):
    """A recipe that cannot be read, or that does not say what a plan needs."""


@dataclass(frozen=True)
class Launch:
    """A command that starts a program. `launcher`: arguments of torchrun or accelerate, in front of it."""

    program: str
    arguments: Arguments
    launcher: Arguments
    environment: Mapping[str, str]
    is_whole: bool  # nothing is left out with "..." or, in a function, with "$@"


class _Loader(yaml.SafeLoader):
    """Loader that refuses a text whose aliases make it long: written out, it would fill the memory."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node and _length(node, {}) > MAX_CHARACTERS:
            raise yaml.YAMLError(f"its aliases make it longer than {MAX_CHARACTERS:,} characters")
        return node


def _length(node: yaml.Node, known: dict[yaml.Node, float]) -> float:
    """Characters of the node with its aliases written out; infinite if it holds itself."""
    if node not in known:
        known[node] = math.inf
        held = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for entry in held for part in (entry if isinstance(entry, tuple) else (entry,))]
        own = 1 if isinstance(node, yaml.CollectionNode) else len(node.value)
        known[node] = own + sum(_length(part, known) for part in parts)
    return known[node]


def read_yaml(text: str) -> Any:
    """Parse a YAML text. Raises ValueError if it is not YAML, or too long with its aliases written out."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, LookupError, AttributeError) as error:
        raise ValueError(str(error)) from error


def launches(text: str) -> list[Launch]:
    """Every command of the script that starts a tool of TRL or ms-swift, a server, or a Python file."""
    try:
        found = [_launch(command) for command in commands(text)]
    except (ShellError, RecursionError) as error:
        raise RecipeError(f"the script cannot be read: {error}") from error
    return [launch for launch in found if launch]


def _launch(command: Command) -> Launch | None:
    words = command.words
    if words[0] in ("echo", "pip"):
        return None
    for place, word in enumerate(words):
        name, after = word.rpartition("/")[2], place + 1
        following = words[after] if after < len(words) else "-"
        if name in TOOLS and re.fullmatch(r"[a-z][\w-]*", following):
            program, after = f"{name} {following}", after + 1
            if program == "swift megatron" and after < len(words):
                program, after = f"megatron {words[after]}", after + 1
        elif word == "-m" and following not in LAUNCHERS:
            program, after = _tool(following), after + 1
        elif word.endswith(".py"):
            program = _tool(word)
        else:
            continue
        is_whole = OPEN.isdisjoint(words)
        return Launch(program, _arguments(words[after:]), _arguments(words[:place]), command.environment, is_whole)
    unknown = [word for word in words if UNKNOWN.fullmatch(word)]
    if unknown and (unknown[0] == words[0] or words[0].rpartition("/")[2] in STARTERS):
        return Launch(unknown[0], {}, {}, command.environment, is_whole=True)
    return None


def _tool(name: str) -> str:
    for pattern, tool in MODULES.items():
        if match := re.fullmatch(pattern, name):
            return match.expand(tool)
    return name


def _arguments(words: list[str]) -> Arguments:
    """`--name value…` and `--name=value`; a first word that is a YAML or JSON file is the configuration."""
    arguments: dict[str, list[str]] = {}
    name = None
    for place, word in enumerate(words):
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("-", "_")
            arguments[name] = [value] if value else []
        elif name is not None and word != "...":
            arguments[name].append(word)
        elif place == 0 and word.endswith((".yaml", ".yml", ".json")):
            arguments["config"] = [word]
    return {key: values[0] if len(values) == 1 else values for key, values in arguments.items()}


def beside(name: str, folder: Path) -> Path | None:
    """The file of that name, relative to the recipe's folder or to the working folder."""
    return next((path for path in (folder / name, Path(name)) if path.is_file()), None)


def why_not_grpo(launch: Launch, arguments: Arguments, system: str, folder: Path) -> str | None:
    """Reason why the command is not a training by GRPO (or RLOO) in this system; None if it is one."""
    program = launch.program
    owner = {"swift": "swift", "megatron": "swift", "trl": "trl"}.get(program.partition(" ")[0])
    if program in SERVERS:
        return f"{program} is a server"
    if owner not in (None, system):
        return f"{program} is not {system}'s: give --recipe {owner}"
    if owner and program not in TRAINERS:
        return f"{program} does not train by GRPO"
    kind = arguments.get("rlhf_type", "dpo")
    if owner == "swift" and kind != "grpo" and ("rlhf_type" in arguments or launch.is_whole):
        said = "" if "rlhf_type" in arguments else ", its default"
        return f"{program} trains by {kind}{said}, not by GRPO: it needs --rlhf_type grpo"
    if not launch.is_whole:
        return f"{program} is not written out (it says '...', or '$@' in a function): add what it leaves open"
    if owner:
        return None
    if UNKNOWN.fullmatch(program):
        return f"what is started stands in {program}, whose value depends on what happens before; write it out"
    if VERL.fullmatch(program):
        return f"{program} is verl's, whose scripts are not read ({VERL_PAGE})"
    if system == "swift" or not program.endswith(".py"):
        return f"{program} is not known"
    return _why_not_own_program(program, arguments, folder)


def _why_not_own_program(program: str, arguments: Arguments, folder: Path) -> str | None:
    """Reason why a Python file does not take TRL's arguments for GRPO; None if it does. Read from its code if that is
    here."""
    if path := beside(program, folder):
        code = path.read_text(errors="replace")
        if not re.search(r"GRPOConfig|RLOOConfig", code):
            return f"{program} does not train by GRPO"
        if not re.search(r"TrlParser|HfArgumentParser", code):
            return f"{program} does not take TRL's arguments: its settings stand in its code, which is not read"
        return None
    if not GRPO_NAME.search(program) and not ONLY_GRPO & arguments.keys():
        return f"{program} is not here, and nothing says that it trains by GRPO"
    if not SETTINGS & arguments.keys():
        return f"{program} is given no setting that a plan follows from: they stand in its code, which is not read"
    return None


def trains_by_rloo(launch: Launch, folder: Path) -> bool:
    path = beside(launch.program, folder)
    return launch.program == "trl rloo" or "RLOOConfig" in (path.read_text(errors="replace") if path else "")


def processes(launch: Launch, arguments: Arguments, folder: Path) -> dict[str, Any]:
    """Numbers whose product is the number of training processes; empty if they are not known."""
    said = {**launch.environment}
    for given in (launch.launcher, arguments):
        said |= {name.upper(): value for name, value in given.items()}
    if arguments.get("global_world_size") is not None:
        return {"global_world_size": arguments["global_world_size"]}
    if "NUM_PROCESSES" in said:
        return {"num_processes": said["NUM_PROCESSES"]}
    config = launch.launcher.get("config_file") or arguments.get("accelerate_config")
    if config and (number := _accelerate_processes(str(config), folder)):
        return {"num_processes": number}
    return {name: said[name] for name in ("NPROC_PER_NODE", "NNODES") if name in said}


def _accelerate_processes(config: str, folder: Path) -> Any:
    """Number of processes in a configuration of accelerate, or in one that TRL ships; None if the file is not here."""
    path = beside(config, folder)
    if path is None:
        return TRL_CONFIGS.get(config)
    try:
        values = read_yaml(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError(f"{path}: a configuration of accelerate is YAML or JSON: {error}") from error
    if not isinstance(values, dict):
        return None
    return 1 if values.get("distributed_type") in ("NO", False) else values.get("num_processes")
