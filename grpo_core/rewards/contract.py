"""The reward contract: resolve a function by name and know which columns it reads.

A reward has TRL's signature `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, `async def` or
not; None means "does not apply to this row". A name such as `verl:module:function` stands for a function with another
framework's signature (`adapters`). A reward may take fewer of these arguments, and those of `trl_arguments`; every
other parameter without a default is a column of the data or one of the config's `args`. What it gets is its own: if it
changes its arguments, nothing else changes. The annotation of a column's parameter says what it may
hold: `Sequence[str]` takes text, `list[float]` numbers, `Sequence[str | None]` text with gaps.

A function is called once for all completions of a generation batch that its process samples. If it is `async def`, it
is called with each group, or several together, as soon as they are complete, while others are still being sampled. A
decorator around an asynchronous function should therefore be `async def` itself; if it only returns the coroutine, the
function is called at the end.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_core.config.functions import framework_of, own_name
from grpo_core.config.inputs import RewardConfig
from grpo_core.errors import RewardError, install
from grpo_core.rewards.adapters import swift, verl
from grpo_core.rewards.builtin.record import Range, RewardFunction
from grpo_core.rewards.isolated import RewardProcess, kind_of
from grpo_core.rewards.registry import BUILTIN
from grpo_core.system import own_code
from grpo_core.system.own_code import code_of

if TYPE_CHECKING:  # a third of what the process of an isolated reward would import
    from grpo_core.config.run import RunConfig

ADAPTERS = {"verl": verl.adapted, "swift": swift.adapted}
ROLLOUT_ARGUMENTS = (
    *("prompts", "completions", "completion_ids", "environments"),
    *("trainer_state", "log_extra", "log_metric"),
)


@dataclass(frozen=True)
class Reward:
    """A resolved reward function.

    `columns`: columns of the data that it needs, with the type of a value; `value_problems`: see `BuiltinReward`;
    `accepts`: arguments that it takes; `range`: the lowest and highest value it may give; `process`: where it runs if
    it is isolated.
    """

    name: str
    function: RewardFunction
    args: Mapping[str, Any]
    timeout: float  # seconds for one call
    range: Range | None
    columns: Mapping[str, Any]
    accepts: frozenset[str] | None  # None: takes **kwargs
    is_async: bool  # a call certainly returns a coroutine
    value_problems: Mapping[str, Callable[[str], str]]
    process: RewardProcess | None = None
    needs_environments: bool = False  # it cannot be called without them
    reads_state: bool = False  # its values may follow from the place in the training
    sources: frozenset[str] | None = None  # of the rows that it scores; None: of all

    def scores(self, row: Mapping[str, Any]) -> bool:
        """True if the reward is one of the row's source."""
        return self.sources is None or row["source"] in self.sources

    @property
    def reads_environments(self) -> bool:
        return self.accepts is not None and "environments" in self.accepts


def check_environments(rewards: Sequence[Reward], are_there: bool) -> None:
    """Raises RewardError for a reward that reads `environments` if there are none, or if it is isolated: they stay with
    the training's process."""
    for reward in rewards:
        if reward.needs_environments and not are_there:
            raise RewardError(
                f"reward {reward.name!r} reads `environments`, and there are none: name a class in "
                "environment.environment_factory, or functions in environment.tools"
            )
        if reward.reads_environments and are_there and reward.process:
            raise RewardError(
                f"reward {reward.name!r} reads `environments`, which cannot be sent to the process of an isolated "
                "reward: remove isolated = true"
            )


def rewards_of(config: RunConfig) -> list[Reward]:
    """The rewards of a run, each for the sources that name it. Raises RewardError as `resolve` does."""
    by_source = {it.name: config.rewards_of(it.name) for it in config.data.sources}
    return [
        replace(
            resolve(reward),
            sources=frozenset(name for name, own in by_source.items() if reward.name in own) if by_source else None,
        )
        for reward in config.rewards
    ]


def resolve(config: RewardConfig) -> Reward:
    """Find the function and read its signature. Raises RewardError if it is missing or cannot be called as configured.

    An isolated function is imported by its own process only.
    """
    _check_builtin(config)
    if not config.isolated:
        return resolve_here(config)
    process = RewardProcess(config)
    found = process.description
    return Reward(
        name=config.name,
        function=process.call,
        args=config.args,
        timeout=config.timeout,
        range=range_of(config),
        columns={column: kind_of(names) for column, names in found["columns"].items()},
        accepts=None if found["accepts"] is None else frozenset(found["accepts"]),
        is_async=found["is_async"],
        value_problems=_value_problems(config),
        process=process,
        needs_environments=found["needs_environments"],
        reads_state=found["reads_state"],
    )


def resolve_here(config: RewardConfig) -> Reward:
    """`resolve` by importing the function into this process."""
    function = find(config.function, config.args)
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    accepts = {p.name for p in named}
    unknown = set(config.args) - accepts
    if unknown and not takes_any:
        raise RewardError(f"reward {config.name!r} takes no argument {sorted(unknown)}; it takes {sorted(accepts)}")
    given = {*ROLLOUT_ARGUMENTS, *config.args}
    columns = {p.name: _value_type(p, function) for p in named if p.default is p.empty and p.name not in given}
    if verl.TEXT in columns and not framework_of(config.function):
        raise RewardError(
            f"reward {config.name!r} takes a parameter {verl.TEXT!r}: write 'verl:{config.function}' if it is a reward "
            "of verl; otherwise completions come as 'completions'"
        )
    if "prompt" in columns:
        raise RewardError(f"reward {config.name!r} takes a parameter 'prompt'; the prompts come as 'prompts'")
    return Reward(
        name=config.name,
        function=function,
        args=config.args,
        timeout=config.timeout,
        range=range_of(config),
        columns=columns,
        accepts=None if takes_any else frozenset(accepts),
        is_async=_is_async(function),
        value_problems=_value_problems(config),
        needs_environments=any(p.name == "environments" and p.default is p.empty for p in named),
        reads_state="trainer_state" in accepts,
    )


def _value_problems(config: RewardConfig) -> Mapping[str, Callable[[str], str]]:
    record = BUILTIN.get(config.function)
    return record.value_problems if record else {}


def range_of(config: RewardConfig) -> Range | None:
    """Lowest and highest value that the function may give: as configured, else as a built-in reward's record says; None
    if neither does."""
    record = BUILTIN.get(config.function)
    return config.range or (record.range if record else None)


def source_of(config: RewardConfig) -> bytes:
    """Bytes that change when the reward does, wherever its files lie: those of the module that names it and of the
    function itself; of a built-in reward its version."""
    if is_builtin(config.function):
        return f"version {BUILTIN[config.function].version}".encode()
    return b"".join(sorted(Path(file).read_bytes() for file in files_of(config)))


def files_of(config: RewardConfig) -> list[str]:
    """The files that `source_of` reads. An isolated reward is imported by its own process only."""
    return RewardProcess(config).description["files"] if config.isolated else files_here(config)


def files_here(config: RewardConfig) -> list[str]:
    """`files_of` by importing the function into this process; none for a built-in reward."""
    function = find(config.function)
    return [] if is_builtin(config.function) else own_code.files_of(own_name(config.function), function)


def check(config: RewardConfig) -> None:
    """Raises RewardError if there is no such reward, as far as that is known without running its module, if its
    libraries are not installed, or if it cannot take its args."""
    if not is_builtin(config.function):
        own_code.check_source(own_name(config.function), f"reward {config.function!r}", RewardError)
    _check_builtin(config)


def _check_builtin(config: RewardConfig) -> None:
    """Raises RewardError if libraries that a built-in reward needs are not installed, or it cannot take its args."""
    if (record := BUILTIN.get(config.function)) is None:
        return
    if absent := [module for module in record.modules if importlib.util.find_spec(module) is None]:
        raise RewardError(
            f"reward {config.name!r} needs {' and '.join(absent)}, not installed here: {install(record.extra)}"
        )
    if problem := record.args_problem(config.args):
        raise RewardError(f"reward {config.name!r}: {problem}")


def is_builtin(function: str) -> bool:
    """True if the reward is a built-in one, not a `module:function`. Raises RewardError if it is neither."""
    if function not in BUILTIN and ":" not in function:
        raise RewardError(
            f"no built-in reward is called {function!r}; there are {', '.join(BUILTIN)}; "
            "your own is written module:function"
        )
    return function in BUILTIN


def _is_async(function: Any) -> bool:
    """True if a call certainly returns a coroutine; the function under a decorator (`__wrapped__`) does not show it."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _value_type(parameter: inspect.Parameter, function: RewardFunction) -> Any:
    """Type of one value of a column by the annotation, such as `str` for `Sequence[str]` and `list[str] | None`."""
    annotation = parameter.annotation
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, getattr(code_of(function), "__globals__", {}))
        except Exception:  # an annotation may name what only a type checker imports
            return Any
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        (annotation, *others) = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        if others:
            return Any
    values = [kind for kind in typing.get_args(annotation) if kind is not Ellipsis]
    return values[0] if len(values) == 1 else Any


def find(function: str, args: Collection[str] = ()) -> RewardFunction:
    """Find the function of this name. Raises RewardError if there is none, or it cannot be imported or called. `args`:
    names of the arguments that the configuration gives."""
    if is_builtin(function):
        return BUILTIN[function].function
    found, what = find_named(function), f"reward {function!r}"
    if framework := framework_of(function):
        return ADAPTERS[framework](found, args, what)
    if inspect.isclass(found):
        raise RewardError(
            f"{what} is a class: write 'swift:{function}' if it is a reward of ms-swift; else make an object of it in "
            f"its module, as in reward = {found.__name__}(…), and name that"
        )
    return found


def find_named(function: str) -> Any:
    """Find what a module has under this name: a function, a class, or an object to be called. Raises RewardError as
    `find` does."""
    what = f"reward {function!r}"
    if framework_of(function) == "swift":
        swift.provide_bases()
    found = own_code.load(own_name(function), what, RewardError)
    if not callable(found):
        raise RewardError(f"{what} is a {type(found).__name__}, not a function or an object to be called")
    return found
