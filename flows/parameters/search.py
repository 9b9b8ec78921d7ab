"""The sweep whose values Optuna proposes (`grpo sweep --optuna`): reads its ranges, and refuses wrong ones before the
first arm starts."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from flows.parameters.arms import (
    MOST_ARMS,
    Arm,
    Grid,
    Load,
    Search,
    Sweep,
    Values,
    collect,
    combine,
    load_base,
    make_arm,
    make_sweep,
    refuse_keys,
    sweep_name,
)
from flows.parameters.early_stop_refusals import refuse_stopping
from grpo_core.errors import ConfigError, GrpoError, install
from tasks.stages.trials import TRIALS, Range, Space, is_other_space

FORM = "is not of the form LOW:HIGH or LOW:HIGH:log, with LOW below HIGH, such as 1e-6:1e-4:log"


def read_ranges(texts: Sequence[str]) -> dict[str, str]:
    """Read the text of each key's range from texts such as `train.learning_rate=1e-6:1e-4:log`. Raises ConfigError if a
    text has another form, or if a key is given twice."""
    ranges: dict[str, str] = {}
    for text in texts:
        key, separator, given = (part.strip() for part in text.partition("="))
        if not separator or not key:
            raise ConfigError(f"--range {text!r} is not of the form section.key=LOW:HIGH")
        if key in ranges:
            raise ConfigError(f"--range {key}: given twice; give it once")
        ranges[key] = given
    return ranges


def make_requested_sweep(
    load: Load, grid: Grid, seeds: int, name: str, stop_early: bool, trials: int, ranges: Mapping[str, str]
) -> Sweep:
    """Make the sweep that a command or a form asks for: over a grid, or by `trials` trials in ranges. See
    `make_sweep`."""
    if not trials and not ranges:
        sweep = make_sweep(load, grid, seeds, name)
        if stop_early:
            refuse_stopping(sweep.name, sweep.arms)
        return replace(sweep, stop_early=stop_early)
    _refuse_options(ranges, grid, trials, seeds, stop_early)
    return make_search(load, ranges, grid, trials, name)


def make_search(load: Load, ranges: Mapping[str, str], grid: Grid, trials: int, name: str) -> Sweep:
    """Make the sweep over `trials` arms, whose values are proposed one arm after the other: from the ranges, and from
    the grid's values as choices. `load`: reads the configuration with some keys changed.

    Raises GrpoError, as `make_sweep` does, and if the configuration refuses an end of a range, or an integer in it.
    """
    space: Space = {**{key: read_range(key, text) for key, text in ranges.items()}, **grid}
    ends = {key: [it.low, it.high] for key, it in space.items() if isinstance(it, Range)}
    if (count := 2 ** len(ends) * len(combine(grid))) > MOST_ARMS:
        raise ConfigError(
            f"--range: the ends of the ranges with all choices are {count:,} combinations, and at most {MOST_ARMS} are "
            "checked; search fewer keys"
        )
    corners = combine({**ends, **grid})
    base = load_base(load, corners)
    sweep = sweep_name(base, name)
    refuse_keys({**dict.fromkeys(ranges, "--range"), **dict.fromkeys(grid, "--grid")}, base)
    size = math.prod(it.count if isinstance(it, Range) else len(it) for it in space.values())
    if size < trials:
        raise ConfigError(
            f"--optuna {trials}: the ranges hold only {size:,.0f} combinations; try them all by --grid, or, for any "
            "number between two integers, write 0.0:1.0"
        )
    if is_other_space(sweep, space):
        raise ConfigError(
            f"--range: the sweep {sweep} searches other ranges ({TRIALS} in its folder); give this one another --name"
        )
    make = partial(make_arm, load, base, sweep)
    arms = collect(corners, make)
    for key in ranges:
        _refuse_between(key, space[key], corners[0], make)
    return Sweep(sweep, base, arms, search=Search(space, trials, make))


def _refuse_options(ranges: Mapping[str, str], grid: Grid, trials: int, seeds: int, stop_early: bool) -> None:
    if not trials:
        raise ConfigError(
            f"--range {next(iter(ranges))}: only with --optuna N, which tries N values; --grid tries given ones"
        )
    if not ranges:
        raise ConfigError("--optuna needs a range to search: --range section.key=LOW:HIGH; --grid tries given values")
    if not 2 <= trials <= MOST_ARMS:
        raise ConfigError(f"--optuna {trials}: a sweep has from 2 to {MOST_ARMS} arms; give another number")
    if both := sorted(ranges.keys() & grid.keys()):
        raise ConfigError(f"--range {both[0]}: it is in --grid too; give the key once")
    if seeds > 1 or "seed" in {*ranges, *grid}:
        raise ConfigError(
            "--optuna with several seeds: each proposal is judged by one training; search first, then run the best "
            "values by --grid with --seeds"
        )
    if stop_early:
        raise ConfigError(
            "--optuna with --stop-early: a stopped arm is not evaluated, so the search would learn nothing from it; "
            "leave out one of the two"
        )
    if not find_spec("optuna"):
        raise ConfigError(f"--optuna needs optuna, not installed here: {install('optuna')}")


def read_range(key: str, text: str) -> Range:
    """Read a range from LOW:HIGH or LOW:HIGH:log: of integers if both ends are written as integers. Raises ConfigError
    if the text has another form."""
    parts = str(text).split(":")
    try:
        numbers = [tomllib.loads(f"v = {end}")["v"] for end in parts[:2]]
    except tomllib.TOMLDecodeError:
        numbers = []
    numbers = [end for end in numbers if type(end) in (int, float) and abs(end) < math.inf]
    if len(numbers) != 2 or numbers[0] >= numbers[1] or parts[2:] not in ([], ["log"]):
        raise ConfigError(f"--range {key}={text}: it {FORM}")
    log = len(parts) == 3
    if log and numbers[0] <= 0:
        raise ConfigError(f"--range {key}={text}: {numbers[0]:g} is not on a logarithmic scale; give a LOW above 0")
    low, high = numbers
    return Range(low, high, log, whole=type(low) is type(high) is int)


def _refuse_between(key: str, found: Range | Sequence[Any], values: Values, make: Callable[[Values], Arm]) -> None:
    """Raises ConfigError if an integer between the ends of a range is refused. Skipped if they are too many to try."""
    if not isinstance(found, Range) or found.count > MOST_ARMS:
        return
    for number in range(int(found.low) + 1, int(found.high)):
        try:
            make({**values, key: number})
        except GrpoError as error:
            raise ConfigError(
                f"--range {key}: {number} is refused; to try some of the values only: --grid {key}=VALUE,VALUE\n{error}"
            ) from error
