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

from flows.parameters.early import refuse_early
from flows.parameters.stopping import refuse_stopping
from grpo_core.config.base import flatten
from grpo_core.config.evaluation import EVALUATED_BY
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError, GrpoError
from grpo_core.planning.plan import Plan
from tasks.stages.arms import arm_prefix
from tasks.stages.trials import Space

MOST_ARMS = 256
ALIAS = "arm"  # of the arm registered last; the configured alias is for the one that is chosen
LONGEST_LABEL = 120  # characters of a run's name after the sweep's
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
SHARE_OF_A_SOURCE = re.compile(
    r"data\.sources\.\d+\.(weight|epochs)"
)  # of the training prompts, not of those evaluated
SET_BY_SWEEP = ("name", "registry.", "promotion.")
ARMS_NAMED = 3  # of those that are refused for one reason
Values = Mapping[str, Any]  # by key
Grid = Mapping[str, Sequence[Any]]
Load = Callable[[Values], RunConfig]


@dataclass(frozen=True)
class Arm:
    """A run of a sweep. `values`: by key, those in which the arms differ; `keys`: these and what a sweep sets in every
    arm; `plan`: if validate keeps all prompts."""

    values: Values
    keys: Values
    config: RunConfig
    plan: Plan

    @property
    def label(self) -> str:
        return label_of(self.values)


@dataclass(frozen=True)
class Search:
    """Values that Optuna proposes, one arm after the other. `space`: what the values of each key are drawn from;
    `trials`: how many arms; `make`: the arm of some values, which raises GrpoError if they are refused."""

    space: Space
    trials: int
    make: Callable[[Values], Arm]


@dataclass(frozen=True)
class Sweep:
    """`name`: what the names of its arms begin with; `base`: the configuration, without what the arms set;
    `stop_early`: whether arms that fall behind are stopped; `search`: if the arms are proposed one by one, how. `arms`
    are then those at the ends of the ranges, by which the search was checked, and are not run."""

    name: str
    base: RunConfig
    arms: Sequence[Arm]
    stop_early: bool = False
    search: Search | None = None

    @property
    def num_arms(self) -> int:
        return self.search.trials if self.search else len(self.arms)


def read_grid(texts: Sequence[str]) -> dict[str, list[Any]]:
    """The values of each key, from texts such as `train.learning_rate=1e-5,3e-5`: TOML values, bare strings allowed.
    Raises ConfigError for what has another form, and for a key that is given twice."""
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
    try:
        return tomllib.loads(f"v = [{text}]")["v"]
    except tomllib.TOMLDecodeError:
        return [_value(part.strip()) for part in text.split(",")]


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def make_sweep(load: Load, grid: Grid, seeds: int, name: str, stop_early: bool = False) -> Sweep:
    """The sweep over every combination of the grid's values, each with so many seeds from the configuration's on.
    `load`: the configuration with some keys changed; `name`: of the sweep among those of this configuration.

    Raises ConfigError if the configuration or a key is wrong, if arms are the same or too many, or could not be
    compared; GrpoError, which names each arm that is refused, for what `refuse_early` refuses. Nothing is begun.
    """
    combinations = combine(grid, seeds)
    if seeds > 1 and "seed" in grid:
        raise ConfigError("--grid seed and --seeds: both set the seeds; give one of them")
    if not grid and seeds == 1:
        raise ConfigError("a sweep needs what differs: --grid section.key=value,value, or --seeds with more than one")
    if len(combinations) * seeds < 2:
        raise ConfigError(f"1 arms: a sweep has from 2 to {MOST_ARMS}; give other values")
    base = load_base(load, combinations)
    sweep = sweep_name(base, name)
    refuse_keys(dict.fromkeys(grid, "--grid"), base)
    if seeds > 1:
        all_seeds = range(base.seed, base.seed + seeds)
        combinations = [{**values, "seed": seed} for values in combinations for seed in all_seeds]
    arms = collect(combinations, lambda values: make_arm(load, base, sweep, values))
    _refuse_equal(arms)
    if stop_early:
        refuse_stopping(sweep, arms)
    return Sweep(sweep, base, arms, stop_early)


def combine(grid: Grid, seeds: int = 1) -> list[Values]:
    """Every combination of the grid's values. Raises ConfigError if with so many seeds they are above MOST_ARMS."""
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"--grid {key}={values!r}: give a list of values")
    if (count := math.prod(len(values) for values in grid.values()) * seeds) > MOST_ARMS:
        raise ConfigError(f"{count} arms: a sweep has from 2 to {MOST_ARMS}; give other values")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def load_base(load: Load, combinations: Sequence[Values]) -> RunConfig:
    """The configuration as it is, or, if a key is missing there that all arms set, with the first values that it takes.
    Raises GrpoError if no arm has a valid configuration."""
    try:
        return load({})
    except ConfigError:
        for values in combinations:
            with suppress(GrpoError):
                return load(values)
        collect(combinations, load)
        raise


def sweep_name(base: RunConfig, name: str) -> str:
    """Raises ConfigError if the name could not begin those of runs."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"--name {name!r}: it begins the names of the arms; use letters, digits, '.', '_' and '-'")
    return f"{base.name}.{name}"


def make_arm(load: Load, base: RunConfig, sweep: str, values: Values) -> Arm:
    """The arm with these values. Raises GrpoError if its configuration is refused."""
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
    """Name of the run, without the configuration's own seed: further seeds find the arm that was run without any."""
    named = {key: value for key, value in values.items() if (key, value) != ("seed", base.seed)}
    return arm_prefix(sweep) + _slug(named or values)


def collect(combinations: Sequence[Values], make: Callable[[Values], Any]) -> list[Any]:
    """What `make` makes of each. Raises GrpoError with each reason for which some are refused, once, and the arms that
    it is about, if these are not all."""
    made: list[Any] = []
    refused: dict[str, list[str]] = {}  # by reason
    for values in combinations:
        try:
            made.append(make(values))
        except GrpoError as error:
            for line in str(error).splitlines():
                refused.setdefault(line, []).append(label_of(values))
    if refused:
        reasons: dict[str, str] = {}  # by the arms that they are about
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
    """Raises ConfigError for keys that a sweep sets itself, and for those that outcomes depend on beside the policy.
    `options`: by key, the option that gives its values."""
    for key, option in options.items():
        if _overlaps(key, SET_BY_SWEEP):
            raise ConfigError(f"{option} {key}: the same for all arms of a sweep; give it by --set, or in the file")
        if key == "rollout.max_completion_length" and base.evaluation.max_completion_length:
            continue
        if _overlaps(key, EVALUATED_BY) and not SHARE_OF_A_SOURCE.fullmatch(key):
            raise ConfigError(
                f"{option} {key}: its arms would be evaluated differently, and the best of them could not be chosen; a "
                "run of its own for each value, and `grpo compare`, shows what differs"
                + (", or set evaluation.max_completion_length for all arms" if "completion_length" in key else "")
            )


def _overlaps(key: str, beginnings: Sequence[str]) -> bool:
    """Whether a key, or one below it, begins with one of these."""
    return any(f"{key}.".startswith(it) or it.startswith(f"{key}.") for it in beginnings)


def _refuse_equal(arms: Sequence[Arm]) -> None:
    seen: dict[str, Arm] = {}
    for arm in arms:
        values = json.dumps(flatten(arm.config.model_dump(mode="json", exclude={"name"})), sort_keys=True)
        if values in seen:
            raise ConfigError(f"arms {seen[values].label} and {arm.label} are the same; give each value once")
        seen[values] = arm


def label_of(values: Values) -> str:
    return ", ".join(f"{key}={_text(value)}" for key, value in values.items())


def _slug(values: Values) -> str:
    """Part of a run's name that tells an arm from the others: `learning_rate-1e-05_seed-1`. If values cannot stand in a
    name, or it would be too long, a hash completes it."""
    lasts = [key.rsplit(".", 1)[-1] for key in values]
    names = {key: last if lasts.count(last) == 1 else key for key, last in zip(values, lasts, strict=True)}
    text = "_".join(f"{names[key]}-{_text(value)}" for key, value in values.items())
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:LONGEST_LABEL]
    if plain == text:
        return plain
    return f"{plain}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
