"""Limits what a deployment's parameters may name. Prefect's form is for starting trainings; code, addresses and secrets
are set only on the worker's machine, in its presets and its environment.

`grpo run` may name anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from flows.parameters.form import configs, in_sections, presets, resolve
from grpo_core.config.environment import EnvironmentConfig
from grpo_core.config.files import named_modules, read_values, search_beside
from grpo_core.config.functions import own_name
from grpo_core.config.inputs import DataConfig, RewardConfig
from grpo_core.config.run import RunConfig
from grpo_core.data import own_code
from grpo_core.environments.registry import ADAPTERS, named
from grpo_core.environments.registry import BUILTIN as ENVIRONMENTS
from grpo_core.environments.worker import UnusableError
from grpo_core.environments.worker import found as imported
from grpo_core.errors import ConfigError, RewardError
from grpo_core.rewards.contract import find_named
from grpo_core.rewards.registry import BUILTIN
from grpo_core.system.own_code import code_of

# Comma-separated; a deployment's parameters may name any reward, environment and tool that these modules define.
MODULES = "GRPO_REWARD_MODULES"
ADDRESSES = (
    ("launch", "slurm"),  # options of sbatch decide to which and how many nodes the environment is sent
    ("rollout", "vllm_server_base_urls"),  # the weights are sent there
    ("teacher", "url"),  # prompts and completions are sent there, with the key of the teacher's server
    ("launch", "hosts"),  # the environment is sent there, secrets included
    ("launch", "kubernetes"),  # to the image that the file names
    ("launch", "server_hosts"),
    ("publish", "hub_repository"),  # the weights are pushed there, with the worker's token
    ("launch", "launcher"),  # a scheduler sends the environment to machines of its own choice
)


def resolve_allowed(preset: str, changes: dict[str, Any]) -> RunConfig:
    """Do as `resolve`, for a deployment's parameters. Raises ConfigError, in one message, also for all that they may
    not name."""
    if preset not in (names := presets()):
        raise ConfigError(
            f"preset = {preset!r}: a deployment takes a preset of its worker: {', '.join(names) or 'none'} "
            f"(in {configs()})"
        )
    path, changes = configs() / f"{preset}.toml", in_sections(changes)
    config, own = resolve(preset, changes), read_values(path)
    search_beside(path, _listed())
    if problems := [
        *_rewards(config, own),
        *_columns(config, own),
        *_environments(config, own),
        *_addresses(changes, own),
    ]:
        raise ConfigError("\n".join(problems))
    search_beside(path, named_modules(config))
    return config


def _rewards(config: RunConfig, own: Mapping[str, Any]) -> Iterator[str]:
    known = [(reward["function"], reward.get("args", {})) for reward in own.get("rewards", [])]
    listed = _listed()
    for place, reward in enumerate(config.rewards):
        if (reward.function, reward.args) not in known and (reason := _reward_refusal(reward, listed)):
            yield f"rewards.{place}.function = {reward.function!r}: {reason}"


def _reward_refusal(reward: RewardConfig, listed: set[str]) -> str:
    """Return why a deployment's parameters may not name this reward; "" if they may. Imports only listed modules."""
    if ":" in reward.function:
        return _code_refusal(own_name(reward.function), "rewards", listed, lambda _: find_named(reward.function))
    record = BUILTIN.get(reward.function)
    if record is None:
        return ""  # there is no such reward, which is refused elsewhere
    if record.looks_at_text_only or record.function.__module__ in listed:
        return ""
    return f"it reaches beyond the text; here it may only have the args that a preset gives it ({MODULES})"


def _code_refusal(name: str, kind: str, listed: set[str], find: Callable[[str], Any]) -> str:
    """Return why a deployment's parameters may not name `module:name`; "" if they may. Imports only listed modules."""
    if name.partition(":")[0] not in listed:
        return (
            f"a deployment's parameters may name built-in {kind}, those of its preset, and those of the modules that "
            f"the worker's {MODULES} lists ({', '.join(sorted(listed)) or 'none'})"
        )
    try:
        found = find(name)
    except (ConfigError, RewardError, UnusableError) as error:
        return str(error)
    defined_in = getattr(found if isinstance(found, type) else code_of(found), "__module__", None)
    if defined_in not in listed:
        return f"it is defined in the module {defined_in!r}, which the worker's {MODULES} does not list"
    return ""


def _columns(config: RunConfig, own: Mapping[str, Any]) -> Iterator[str]:
    """Yield why functions that `[data]` names are refused: they are code too."""
    known, listed = {*own_code.named(DataConfig.model_validate(own["data"])).items()}, _listed()
    for key, name in own_code.named(config.data).items():
        if (key, name) not in known and (
            reason := _code_refusal(name, "functions", listed, partial(own_code.find, key))
        ):
            yield f"{key} = {name!r}: {reason}"


def _environments(config: RunConfig, own: Mapping[str, Any]) -> Iterator[str]:
    """Yield why tools and environments are refused: they are code, as rewards are. A class's arguments may hold an
    address or a path."""
    preset, given = EnvironmentConfig.model_validate(own.get("environment", {})), config.environment
    known, listed = {*named(preset)} | ENVIRONMENTS.keys() - ADAPTERS.keys(), _listed()
    for name in named(given):
        if name in ADAPTERS.keys() - known:
            yield (
                f"environment: {name!r}: it hands what a policy writes to other people's code; here only a preset may "
                "name it"
            )
        elif name not in known and (reason := _code_refusal(name, "environments and tools", listed, imported)):
            yield f"environment: {name!r}: {reason}"
    if given.environment_args not in ({}, preset.environment_args) and not all(
        name.partition(":")[0] in listed for name in given.factories.values()
    ):
        yield (
            "environment.environment_args: here only a preset may set them, except for classes of the "
            f"modules that the worker's {MODULES} lists"
        )


def _listed() -> set[str]:
    """The modules of which a deployment's parameters may name any code."""
    return {name.strip() for name in os.environ.get(MODULES, "").split(",")} - {""}


def _addresses(changes: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    for section, key in ADDRESSES:
        given = (changes.get(section) or {}).get(key)
        if given and given != own.get(section, {}).get(key):
            yield (
                f"{section}.{key} = {given!r}: here only a preset may set where the environment, weights or "
                "completions are sent"
            )
