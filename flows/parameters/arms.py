"""The arms of a sweep: a configuration with each combination of some keys' values, each a run of its own."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flows.parameters.early import refuse_early
from grpo_core.config.base import flatten
from grpo_core.config.evaluation import EVALUATED_BY
from grpo_core.config.files import read_overrides
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError, GrpoError
from grpo_core.rewards.composition import range_of_sum
from tasks.stages.arms import arm_prefix

MOST_ARMS = 256
ALIAS = "arm"  # of the arm registered last; the configured alias is for the one that is chosen
LONGEST_LABEL = 120  # characters of a run's name after the sweep's
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
SHARE_OF_A_SOURCE = re.compile(
    r"data\.sources\.\d+\.(weight|epochs)"
)  # of the training prompts, not of those evaluated
SET_BY_SWEEP = ("name", "registry.", "promotion.")
Grid = Mapping[str, Sequence[Any]]
Load = Callable[[list[str]], RunConfig]


@dataclass(frozen=True)
class Arm:
    """A run of a sweep. `values`: by key, those of the grid; `keys`: these and what a sweep sets in every arm."""

    values: dict[str, Any]
    keys: dict[str, Any]
    config: RunConfig

    @property
    def label(self) -> str:
        return ", ".join(f"{key}={_text(value)}" for key, value in self.values.items())

    @property
    def overrides(self) -> list[str]:
        """The keys in the form that `load_config` takes."""
        return [f"{key}={json.dumps(value, default=str)}" for key, value in self.keys.items()]

    @property
    def changes(self) -> dict[str, Any]:
        """The keys in the form that the pipeline takes."""
        return read_overrides(self.overrides)


@dataclass(frozen=True)
class Sweep:
    """`name`: what the names of its arms begin with; `base`: the configuration, without what the arms set; `grid`: the
    values of each key, seeds among them; `stop_early`: whether arms that fall behind are stopped."""

    name: str
    base: RunConfig
    grid: Grid
    arms: Sequence[Arm]
    stop_early: bool = False


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
    `load`: the configuration with some overrides more; `name`: of the sweep among those of this configuration.

    Raises ConfigError if the configuration or a key is wrong, if arms are the same or too many, or could not be
    compared; GrpoError, which names each arm that is refused, for what `refuse_early` refuses. Nothing is begun.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(f"--name {name!r}: it begins the names of the arms; use letters, digits, '.', '_' and '-'")
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"--grid {key}={values!r}: give a list of values")
    base = load([])
    sweep = f"{base.name}.{name}"
    _refuse_keys(grid, base)
    if seeds > 1 and "seed" in grid:
        raise ConfigError("--grid seed and --seeds: both set the seeds; give one of them")
    grid = {**grid, **({"seed": [*range(base.seed, base.seed + seeds)]} if seeds > 1 else {})}
    if not grid:
        raise ConfigError("a sweep needs what differs: --grid section.key=value,value, or --seeds with more than one")
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    if not 2 <= len(combinations) <= MOST_ARMS:
        raise ConfigError(f"{len(combinations)} arms: a sweep has from 2 to {MOST_ARMS}; give other values")
    common = {
        "registry.sweep": sweep,
        "registry.model_name": base.registry.model_name or base.name,
        "registry.alias": ALIAS,
        "promotion.automatic": False,
    }
    arms, refused = [], []
    for values in combinations:
        # Without the configuration's own seed, so that further seeds find the arm that was run without any.
        named = {key: value for key, value in values.items() if (key, value) != ("seed", base.seed)} or values
        arm = Arm(values, {"name": arm_prefix(sweep) + _slug(named), **common, **values}, base)
        try:
            arms.append(replace(arm, config=load(arm.overrides)))
            refuse_early(arms[-1].config)
        except GrpoError as error:
            refused.append(f"arm {arm.label}: {error}")
    if refused:
        raise GrpoError("\n".join(refused))
    _refuse_equal(arms)
    if stop_early:
        _refuse_stopping(grid, arms)
    return Sweep(sweep, base, grid, arms, stop_early)


def _refuse_keys(grid: Grid, base: RunConfig) -> None:
    """Raises ConfigError for keys that a sweep sets itself, and for those that outcomes depend on beside the policy."""
    for key in grid:
        if key.startswith(SET_BY_SWEEP):
            raise ConfigError(f"--grid {key}: the same for all arms of a sweep; give it by --set, or in the file")
        if key == "rollout.max_completion_length" and base.evaluation.max_completion_length:
            continue
        if key.startswith(EVALUATED_BY) and not SHARE_OF_A_SOURCE.fullmatch(key):
            raise ConfigError(
                f"--grid {key}: its arms would be evaluated differently, and the best of them could not be chosen; a "
                "run of its own for each value, and `grpo compare`, shows what differs"
                + (", or set evaluation.max_completion_length for all arms" if "completion_length" in key else "")
            )


def _refuse_equal(arms: Sequence[Arm]) -> None:
    seen: dict[str, Arm] = {}
    for arm in arms:
        values = json.dumps(flatten(arm.config.model_dump(mode="json", exclude={"name"})), sort_keys=True)
        if values in seen:
            raise ConfigError(f"arms {seen[values].label} and {arm.label} are the same; give each value once")
        seen[values] = arm


def _refuse_stopping(grid: Grid, arms: Sequence[Arm]) -> None:
    """Raises ConfigError if it could not be told, or not honestly, that an arm falls behind."""
    if "seed" in grid:
        raise ConfigError(
            "--stop-early with several seeds: the seeds of a setting are averaged, and of those that are left after "
            "some were stopped the mean is too good; leave out one of the two"
        )
    for arm in arms:
        if not arm.config.train.eval_steps:
            raise ConfigError(
                f"--stop-early: arm {arm.label} is not evaluated while it trains; set train.eval_steps, such as --set "
                "train.eval_steps=10"
            )
    unbounded = [repr(it.name) for it in arms[0].config.rewards if not all(map(math.isfinite, range_of_sum([it])))]
    if unbounded:
        raise ConfigError(
            f"--stop-early: no range is known of the rewards {', '.join(unbounded)}, so nothing bounds how far a few "
            "prompts can move the mean; give each its range = [lowest, highest], or a clip"
        )


def _slug(values: Mapping[str, Any]) -> str:
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
