"""The arms of a sweep: a configuration with each combination of some keys' values, each a run of its own."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from flows.parameters.early_refusals import refuse_early
from grpo_core.config.base import flatten
from grpo_core.config.evaluation import EVALUATED_BY
from grpo_core.config.run import RunConfig, is_run_name
from grpo_core.errors import ConfigError, GrpoError
from grpo_core.planning.plan import Plan
from tasks.stages.arms import arm_prefix
from tasks.stages.trials import Space

MOST_ARMS = 256
ALIAS = "arm"  # of the arm registered last; the chosen arm gets the configured alias
LONGEST_LABEL = 120  # characters of a run's name after the sweep's
# Of the training prompts, not of those evaluated.
SHARE_OF_A_SOURCE = re.compile(r"data\.sources\.\d+\.(weight|epochs)")
SET_BY_SWEEP = ("name", "registry.", "promotion.")
ARMS_NAMED = 3  # of the arms refused for one reason
Grid = Mapping[str, Sequence[Any]]
Values = Mapping[str, Any]  # by key
Load = Callable[[Values], RunConfig]


@dataclass(frozen=True)
class Arm:
    """A run of a sweep. `values`: by key, those in which the arms differ; `keys`: these and the keys that a sweep sets
    in every arm; `plan`: the run's plan, provided that validate keeps all prompts."""

    values: Values
    keys: Values
    config: RunConfig
    plan: Plan

    @property
    def label(self) -> str:
        return arm_label(self.values)


def arm_label(values: Values) -> str:
    return ", ".join(f"{key}={value_as_text(value)}" for key, value in values.items())


def value_as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


@dataclass(frozen=True)
class Search:
    """A search whose values Optuna proposes, one arm after the other. `space`: range or choices of each key; `trials`:
    number of arms; `make`: makes the arm with some values, and raises GrpoError if they are refused."""

    space: Space
    trials: int
    make: Callable[[Values], Arm]


@dataclass(frozen=True)
class Sweep:
    """A sweep. `name`: first part of its arms' names; `base`: the configuration before the arms' keys are set;
    `stop_early`: whether arms that fall behind are stopped; `search`: proposes the arms one by one. With `search`,
    `arms` are those at the ends of the ranges, by which the search was checked, and are not run."""

    name: str
    base: RunConfig
    arms: Sequence[Arm]
    stop_early: bool = False
    search: Search | None = None

    @property
    def num_arms(self) -> int:
        return self.search.trials if self.search else len(self.arms)


def read_grid(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Read the values of each key from texts such as `train.learning_rate=1e-5,3e-5`: TOML values, bare strings
    allowed. Raises ConfigError if a text has another form, or if a key is given twice."""
    grid: dict[str, list[Any]] = {}
    for text in texts:
        key, separator, values = text.partition("=")
        key = key.strip()
        if not separator or not key or not values.strip():
            raise ConfigError(f"--grid {text!r} is not of the form section.key=value,value")
        if key in grid:
            raise ConfigError(f"--grid {key}: given twice; list all values in one, {key}=value,value")
        grid[key] = _values(values)
    return grid


def _values(text: str) -> list[Any]:
    with suppress(tomllib.TOMLDecodeError):
        return tomllib.loads(f"v = [{text}]")["v"]
    return [_value(part.strip()) for part in text.split(",")]


def _value(text: str) -> Any:
    with suppress(tomllib.TOMLDecodeError):
        return tomllib.loads(f"v = {text}")["v"]
    return text


def make_sweep(load: Load, grid: Grid, seeds: int, name: str) -> Sweep:
    """Make the sweep over every combination of the grid's values, each with `seeds` seeds, starting at the
    configuration's. `load`: reads the configuration with some keys changed; `name`: distinguishes the sweeps of one
    configuration.

    Raises ConfigError if the configuration or a key is wrong, or if arms are the same, too many or not comparable.
    Raises GrpoError, which names the arms, if `refuse_early` refuses some. Starts nothing.
    """
    combinations = combine(grid, seeds)
    if seeds > 1 and "seed" in grid:
        raise ConfigError("--grid seed and --seeds: both set the seeds; give one of them")
    if not grid and seeds == 1:
        raise ConfigError(
            "the arms of a sweep have to differ: give --grid section.key=value,value, or --seeds with more than one"
        )
    if len(combinations) * seeds < 2:
        raise ConfigError(f"1 arm: a sweep has from 2 to {MOST_ARMS}; give other values")
    base = load_base(load, combinations)
    sweep = sweep_name(base, name)
    refuse_keys(dict.fromkeys(grid, "--grid"), base)
    if seeds > 1:
        all_seeds = range(base.seed, base.seed + seeds)
        combinations = [{**values, "seed": seed} for values in combinations for seed in all_seeds]
    arms = collect(combinations, lambda values: make_arm(load, base, sweep, values))
    _refuse_equal(arms)
    return Sweep(sweep, base, arms)


def combine(grid: Grid, seeds: int = 1) -> list[Values]:
    """Every combination of the grid's values. Raises ConfigError if combinations × seeds exceed MOST_ARMS."""
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"--grid {key}={values!r}: give a list of values")
    if (count := math.prod(len(values) for values in grid.values()) * seeds) > MOST_ARMS:
        raise ConfigError(f"{count} arms: a sweep has from 2 to {MOST_ARMS}; give other values")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def load_base(load: Load, combinations: Sequence[Values]) -> RunConfig:
    """Load the configuration as it is. If it lacks a key that all arms set, load it with the first combination that
    makes it valid. Raises GrpoError if no arm has a valid configuration."""
    try:
        return load({})
    except ConfigError:
        for values in combinations:
            with suppress(GrpoError):
                return load(values)
        collect(combinations, load)
        raise


def sweep_name(base: RunConfig, name: str) -> str:
    """Full name of the sweep. Raises ConfigError if runs' names cannot begin with it."""
    if not is_run_name(name):
        raise ConfigError(f"--name {name!r}: the arms' names begin with it; use letters, digits, '.', '_' and '-'")
    return f"{base.name}.{name}"


def make_arm(load: Load, base: RunConfig, sweep: str, values: Values) -> Arm:
    """Make the arm with these values. Raises GrpoError if its configuration is refused."""
    keys = {
        "name": arm_name(base, sweep, values),
        "registry.sweep": sweep,
        "registry.model_name": base.registry.model_name or base.name,
        "registry.alias": ALIAS,
        "promotion.automatic": False,
        **values,
    }
    config = load(keys)
    return Arm(values, keys, config, refuse_early(config))


def arm_name(base: RunConfig, sweep: str, values: Values) -> str:
    """Name of the run, without the configuration's own seed, so that a sweep with further seeds finds the arm run
    before."""
    named = {key: value for key, value in values.items() if (key, value) != ("seed", base.seed)}
    return arm_prefix(sweep) + _slug(named or values)


def collect(combinations: Sequence[Values], make: Callable[[Values], Any]) -> list[Any]:
    """Build each arm with `make`. If some are refused, raises GrpoError with each reason once, and the arms concerned
    unless all are."""
    made: list[Any] = []
    refused: dict[str, list[str]] = {}  # by reason
    for values in combinations:
        try:
            made.append(make(values))
        except GrpoError as error:
            for line in str(error).splitlines():
                refused.setdefault(line, []).append(arm_label(values))
    if refused:
        reasons: dict[str, str] = {}  # by the arms concerned
        for line, labels in refused.items():
            about = _about(labels, len(combinations))
            reasons[about] = f"{reasons[about]}\n{line}" if about in reasons else f"{about}{line}"
        raise GrpoError("\n".join(reasons.values()))
    return made


def _about(labels: Sequence[str], arms: int) -> str:
    if len(labels) == arms:
        return ""
    others = f" and {len(labels) - ARMS_NAMED} more" if len(labels) > ARMS_NAMED else ""
    return f"arm {'; '.join(labels[:ARMS_NAMED])}{others}: "


def refuse_keys(options: Mapping[str, str], base: RunConfig) -> None:
    """Raises ConfigError for keys that a sweep sets itself, and for keys by which outcomes would differ even for the
    same policy. `options`: by key, the option that gives its values."""
    for key, option in options.items():
        if _overlaps(key, SET_BY_SWEEP):
            raise ConfigError(
                f"{option} {key}: has to be the same for all arms of a sweep; give it by --set, or in the file"
            )
        if key == "rollout.max_completion_length" and base.evaluation.max_completion_length:
            continue
        if _overlaps(key, EVALUATED_BY) and not SHARE_OF_A_SOURCE.fullmatch(key):
            raise ConfigError(
                f"{option} {key}: the arms would be evaluated differently, so that the best could not be chosen; start "
                "a run for each value, and compare them by `grpo compare`"
                + (", or set evaluation.max_completion_length for all arms" if "completion_length" in key else "")
            )


def _overlaps(key: str, beginnings: Sequence[str]) -> bool:
    """True if a key, or one below it, begins with one of these."""
    return any(f"{key}.".startswith(it) or it.startswith(f"{key}.") for it in beginnings)


def _refuse_equal(arms: Sequence[Arm]) -> None:
    seen: dict[str, Arm] = {}
    for arm in arms:
        values = json.dumps(flatten(arm.config.model_dump(mode="json", exclude={"name"})), sort_keys=True)
        if values in seen:
            raise ConfigError(f"arms {seen[values].label} and {arm.label} are the same; give each value once")
        seen[values] = arm


def _slug(values: Values) -> str:
    """Part of a run's name that distinguishes an arm: `learning_rate-1e-05_seed-1`. If values do not fit into a name,
    or it would be too long, a hash completes it."""
    lasts = [key.rsplit(".", 1)[-1] for key in values]
    names = {key: last if lasts.count(last) == 1 else key for key, last in zip(values, lasts, strict=True)}
    text = "_".join(f"{names[key]}-{value_as_text(value)}" for key, value in values.items())
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:LONGEST_LABEL]
    if plain == text:
        return plain
    return f"{plain}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
