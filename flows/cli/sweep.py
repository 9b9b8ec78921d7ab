"""`grpo sweep`: one run per combination of some keys' values, and the choice of the best."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from flows.cli.compare import show
from flows.cli.terminal import Terminal, refusals, say, set_option
from flows.serving.environment import TAG, configure
from flows.serving.find_server import server_for_command
from grpo_core.config.evaluation import HELD_OUT
from grpo_core.config.files import named_modules, parse_config, read_values, search_beside, with_keys
from grpo_core.config.run import RunConfig
from grpo_core.planning.pace import Pace, pace_request
from grpo_core.planning.plan import Plan
from grpo_core.planning.shapes import PromptLengths
from grpo_core.system.processes import importing
from tasks.processes.measure import measured_pace
from tasks.rendering.figures import NONE, duration, number
from tasks.stages.arms import sweep_folder
from tasks.stages.dependencies import Parts, hash_values
from tasks.stages.lineage import lineage_keys
from tasks.stages.locks import locked
from tasks.stages.run_directory import run_folder
from tasks.stages.table import PLAN, VALIDATE

if TYPE_CHECKING:
    from flows.parameters.arms import Sweep, Values


def sweep(
    config: Annotated[Path, typer.Argument(help="run configuration (TOML), such as configs/quickstart.toml")],
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,VALUE", help="values of one key, such as algorithm.beta=0.0,0.04; can be repeated"
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="trainings per combination, each with another seed")] = 1,
    name: Annotated[str, typer.Option(help="name of the sweep, appended to the configuration's")] = "sweep",
    stop_early: Annotated[
        bool, typer.Option("--stop-early", help="stop arms that have fallen behind; needs train.eval_steps")
    ] = False,
    optuna: Annotated[
        int, typer.Option(metavar="N", help="number of arms whose values Optuna proposes from --range", min=0)
    ] = 0,
    ranges: Annotated[
        list[str] | None,
        typer.Option(
            "--range",
            metavar="KEY=LOW:HIGH[:log]",
            help="range for --optuna, such as train.learning_rate=1e-6:1e-4:log; integers if both ends are; the "
            "values of --grid become choices; can be repeated",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, set_option("override one key for all arms, such as train.max_steps=50")
    ] = None,
) -> None:
    """Run the pipeline with each combination of values, one after the other, and choose the best on the held-out set.
    The same command again continues the sweep. With --optuna, each arm's values are proposed from the outcomes of the
    arms before; --seeds and --stop-early are refused then.

    Exit status 1: an arm failed, 2: refused before anything was started, 130: Ctrl-C, 143: SIGTERM.
    """
    from flows.parameters.arms import read_grid  # imports polars
    from flows.parameters.search import make_requested_sweep, read_ranges

    values = read_values(config, overrides)

    def load(keys: Values) -> RunConfig:
        arm = parse_config(with_keys(values, keys))
        search_beside(config, named_modules(arm))
        return arm

    asked = make_requested_sweep(
        load, read_grid(grid or []), seeds, name, stop_early, optuna, read_ranges(ranges or [])
    )
    configure()
    with refusals(asked.name):
        for folder in (sweep_folder(asked.name), *(run_folder(arm.config.name) for arm in asked.arms)):
            if folder.is_dir():
                with locked(folder):
                    pass  # a run or sweep in use is refused before a server is started
    _show_plan(asked)
    with server_for_command() as url:
        say(f"Sweep {asked.name} starts. Prefect's UI, as long as this runs: {url.removesuffix('/api')}")
        with importing():
            from prefect import tags

            from flows.parameters.form import changes_from_overrides
            from flows.serving.server_setup import prefect_answering
            from flows.sweep import make_sweep_flow
            from tasks.reports.report import PAGE
            from tasks.reports.sweep import describe, read_choice, sweep_sections

    with refusals(asked.name, started=True), prefect_answering(), tags(TAG):
        options = {"grid": grid or [], "seeds": seeds, "optuna": optuna, "ranges": ranges or []}
        folder = make_sweep_flow(asked)(str(config), changes_from_overrides(config, overrides), options)
    choice, arms = read_choice(asked.name)
    for section in sweep_sections(choice, arms):
        show(section, Terminal())
    verdict = describe(choice)
    say(f"\n{verdict.headline}. {verdict.sentence}\npage        {folder / PAGE}")


def _show_plan(sweep: Sweep) -> None:
    """Print each arm with its time and GPU hours as `grpo plan` forecasts them, the sum, and the stages that arms
    share. A search has no arms yet: print the ends of its ranges instead."""
    from flows.parameters.describe_plan import describe_plan  # imports polars

    paces: dict[str, Pace | str] = {}

    def measure(config: RunConfig, plan: Plan, lengths: PromptLengths, *rest: Any) -> Pace | str:
        """Measure the pace once for all arms of the same shape."""
        shape = json.dumps(asdict(pace_request(config, plan, lengths, None, Path(), 1, "")))
        if shape not in paces:
            paces[shape] = measured_pace(config, plan, lengths, *rest)
        return paces[shape]

    plans = []
    for arm in sweep.arms:
        with refusals(f"arm {arm.label}"):
            plans.append(describe_plan(arm.config, measure=measure))
    times = [answer["forecasts"]["time"] for answer in plans]
    updates = [answer["max_steps"] for answer in plans]
    hours = [[it.get(key) for it in times] for key in ("wall_time_hours", "gpu_hours")]
    table = Table(Column("arm", overflow="fold"), "updates", "time", title=f"sweep {sweep.name}")
    if has_gpu := any(hours[1]):
        table.add_column("GPU hours")
    for arm, count, wall, gpu in zip(sweep.arms, updates, *hours, strict=True):
        table.add_row(arm.label, f"{count:,}", *_forecast([wall], [gpu])[: 1 + has_gpu])
    if not sweep.search:
        table.add_section()
        table.add_row(f"{len(sweep.arms)} arms", f"{sum(updates):,}", *_forecast(*hours)[: 1 + has_gpu])
    Terminal().print(table)
    if sweep.search:
        say(
            f"These are the ends of the ranges. Each of {sweep.num_arms} arms has values between them, proposed by "
            "Optuna from the outcomes of earlier arms, and is trained, evaluated and registered."
        )
    else:
        _say_shared_stages(sweep)
    if error := next((it["error"] for it in times if "error" in it), ""):
        say(f"Time: {error}")
    if sweep.base.promotion.automatic:
        say("promotion.automatic is off in the arms: promote the chosen one, when you know it")
    if sweep.base.promotion.set in (HELD_OUT, *sweep.base.evaluated_sources):
        say(
            f"promotion.set is {sweep.base.promotion.set!r}, on which the arm is chosen: no arm can be promoted by it. "
            "Name another set of [[evaluation.sets]] there to promote the chosen one"
        )


def _say_shared_stages(sweep: Sweep) -> None:
    """Print which stages run once for several arms."""
    keys = [lineage_keys(arm.config) for arm in sweep.arms]
    made = {
        "data validated": {of_arm[VALIDATE.name] for of_arm in keys},
        "planned": {of_arm[PLAN.name] for of_arm in keys},
        "base model evaluated": {hash_values(Parts(arm.config).base_answers) for arm in sweep.arms},
    }
    times_made = ", ".join(f"{what} {_times(len(different))}" for what, different in made.items())
    say(f"For all {len(sweep.arms)} arms: {times_made}. Each arm is trained, evaluated and registered.")


def _forecast(wall: Sequence[float | None], gpu: Sequence[float | None]) -> tuple[str, str]:
    """Total time and GPU hours of several arms; a dash if that of one is unknown."""
    return (
        NONE if None in wall else duration(3600 * sum(filter(None, wall))),
        NONE if None in gpu else number(sum(filter(None, gpu))),
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
