"""A sweep's own Prefect tasks: its MLflow run, and the choice among the arms."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.client.schemas.objects import State
from prefect.states import Completed

from grpo_core.config.evaluation import HELD_OUT
from tasks.registry.judging import CHOSEN
from tasks.rendering import figures
from tasks.rendering.markdown import escape, table
from tasks.reports.cost import sum_metrics, training_cost
from tasks.reports.record import Record
from tasks.reports.report import PAGE
from tasks.reports.sweep import Choice, choice_section, describe, read_choice, read_outcomes, sweep_page
from tasks.stages.arms import sweep_folder
from tasks.stages.errors import Interrupted
from tasks.stages.files import write_text
from tasks.stages.run_directory import read_config, run_folder
from tasks.stages.table import REGISTER, TRAIN
from tasks.stages.trials import Space, add_trial
from tasks.tracking.artifacts import show_markdown
from tasks.tracking.early_stop import write_rule
from tasks.tracking.runs import answering, connect
from tasks.tracking.sweeps import end_sweep_run, log_choice, open_sweep_run

TABLE = "arms.csv"  # in the sweep's folder


@task(name="begin")
def begin(sweep: str, experiment: str, trainings: dict[str, str], level: float | None) -> State[None]:
    """Write the rule by which arms are stopped (`write_rule`), and open the sweep's MLflow run."""
    write_rule(sweep, trainings, level)
    open_sweep_run(sweep, experiment)
    return Completed()


@task(name="propose")
def propose(sweep: str, space: Space, seed: int, arms: list[str]) -> State[dict[str, Any]]:
    """Propose the values of one more arm of a search, from the outcomes of the arms before."""
    outcomes = read_outcomes(sweep, arms)
    values = add_trial(sweep, space, seed, [outcomes.get(arm) for arm in arms])
    return Completed(message=f"arm {len(arms) + 1}: {values}", data=values)


@contextmanager
def ending(sweep: str) -> Iterator[None]:
    """End the sweep's MLflow run as KILLED or FAILED if the body is interrupted or fails."""
    try:
        yield
    except BaseException as error:
        failed = isinstance(error, Exception) and not isinstance(error, Interrupted)
        end_sweep_run(sweep, "FAILED" if failed else "KILLED")
        raise


@task(name="choose")
def choose(sweep: str, alias: str) -> State[Path]:
    """Choose the best arm, give its model version the alias, and show all arms: a page and a table in the sweep's
    folder, an artifact, the sweep's MLflow run. Returns the folder."""
    folder = sweep_folder(sweep)
    choice, arms = read_choice(sweep)
    verdict = describe(choice)
    write_text(folder / PAGE, sweep_page(sweep, choice, arms))
    write_text(folder / TABLE, _csv(choice))
    if registered := REGISTER.read_receipt(run_folder(choice.arm)):
        name, version = registered["model_name"], registered["version"]
        with answering():
            client = connect()
            client.set_model_version_tag(name, version, CHOSEN, sweep)
            client.set_registered_model_alias(name, alias, version)
    get_run_logger().info("%s. %s", verdict.headline, verdict.sentence)
    show_markdown("sweep", _markdown(sweep, choice, arms), escape(verdict.headline))
    gain = asdict(choice.best.gain)
    log_choice(
        sweep,
        f"**{escape(verdict.headline)}.** {escape(verdict.sentence)}\n\nOn one page: `sweep/{PAGE}` under Artifacts.",
        f"{choice.metric} {figures.amount(choice.metric, choice.best.value)}, {figures.gain(choice.metric, gain)} "
        f"{figures.interval(choice.metric, gain)}, of {len(arms)} arms",
        {
            f"eval/{HELD_OUT}/trained/{choice.metric}": choice.best.value,
            "arms": float(len(arms)),
            **_costs(choice, arms),
        },
        {"sweep": folder / PAGE, "": folder / TABLE},
    )
    return Completed(message=verdict.headline, data=folder)


def _costs(choice: Choice, arms: Mapping[str, Record]) -> dict[str, float]:
    """The cost of all arms together, those that were stopped early included; tokens of those that finished."""
    finished = [record.cost for record in arms.values()]
    stopped = [training_cost(TRAIN.partial(run), read_config(run)) for run in map(run_folder, choice.stopped)]
    return sum_metrics(finished) | sum_metrics([*finished, *stopped])


def _markdown(sweep: str, choice: Choice, arms: Mapping[str, Record]) -> str:
    verdict, section = describe(choice), choice_section(choice, arms)
    [shown] = section.tables
    rows = [[" ".join(cell) if isinstance(cell, tuple) else cell for cell in row] for row in shown.rows]
    said = escape(f"{verdict.headline}. {verdict.sentence}")
    return f"# {escape(sweep)}\n\n{said}\n\n{table([shown.head, *rows])}\n\n{escape(section.text)}\n"


def _csv(choice: Choice) -> str:
    """Settings as CSV for other programs, the best first."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["setting", choice.metric, "gain_over_base", "low", "high", "may_be_best", "arms"])
    for it in choice.settings:
        arms = " ".join(it.arms.values())
        writer.writerow([it.label, it.value, it.gain.mean, it.gain.low, it.gain.high, it.may_be_best, arms])
    return text.getvalue()
