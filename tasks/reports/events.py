"""Emits events in Prefect about the ends of runs, sweeps, trainings and promotions, for automations and other systems.

docs/reference/events.md lists them in one table. Payloads are flat, since automations' templates name their keys, and
contain no NaN, which JSON cannot represent. Texts are `shortened`, since Prefect's server refuses large events.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.events import emit_event

from grpo_core.config.evaluation import HELD_OUT
from grpo_core.config.run import RunConfig
from tasks.rendering import figures
from tasks.rendering.visible import shortened
from tasks.reports.cost import Cost, run_cost, training_cost
from tasks.reports.report import PAGE, headline, rival_of
from tasks.reports.sweep import describe, read_choice
from tasks.stages.arms import sweep_folder
from tasks.stages.files import read_json
from tasks.stages.prefect_address import flow_run_page
from tasks.stages.run_directory import run_folder
from tasks.stages.table import EVALUATE, REGISTER, TRAIN
from tasks.tracking.runs import RUN_FILE, run_address, version_address

FAILURE = "Flow run encountered an exception: "  # Prefect's prefix of the error


def announce(event: str, kind: str, name: str, payload: Mapping[str, Any], related: Sequence[Any] = ()) -> None:
    """Emit an event of the resource grpo.KIND.NAME. It is not an error if the server does not answer."""
    resource = {"prefect.resource.id": f"grpo.{kind}.{name}", "prefect.resource.name": name}
    emit_event(event, resource, related=[*related], payload={key: _plain(value) for key, value in payload.items()})


def announce_completed(run: Path, config: RunConfig, flow_run_id: str) -> str:
    """Emit grpo.run.completed: the run's stages are all done. Returns the verdict."""
    figures, done = _if_known(lambda: run_figures(run, config)), "all stages are done"
    _announce_end("run", run.name, "completed", done, flow_run_id, figures)
    return figures.get("verdict", done)


def announce_end(flow: Any, flow_run: FlowRun, state: State) -> None:
    """Hook of the pipeline: emit grpo.run.failed, cancelled or crashed."""
    _announce_without_result("run", flow_run, state)


def announce_sweep(sweep: str, flow_run_id: str) -> None:
    """Emit grpo.sweep.completed: all arms are done, and one is chosen."""
    figures = _if_known(lambda: _sweep_figures(sweep))
    _announce_end("sweep", sweep, "completed", "one arm is chosen", flow_run_id, figures)


def announce_sweep_end(flow: Any, flow_run: FlowRun, state: State) -> None:
    """Hook of a sweep: emit grpo.sweep.failed, cancelled or crashed."""
    _announce_without_result("sweep", flow_run, state)


def _announce_without_result(kind: str, flow_run: FlowRun, state: State) -> None:
    """Emit how a flow run has ended, and why, unless it is scheduled again after a crash and so has not ended."""
    with get_client(sync_client=True) as client:
        known = client.read_flow_run(flow_run.id)
    if state.is_crashed() and known.state and known.state.is_scheduled():
        return
    ended = "cancelled" if state.is_cancelling() else state.type.value.lower()
    _announce_end(kind, known.name, ended, (state.message or "").removeprefix(FAILURE), str(known.id), {})


def _sweep_figures(sweep: str) -> dict[str, Any]:
    """Results of a sweep: the chosen arm with its figures on the held-out prompts, and its model version."""
    choice, arms = read_choice(sweep)
    said, gain = describe(choice), choice.best.gain
    registered = REGISTER.read_receipt(run_folder(choice.arm))
    model, version = registered["model_name"], registered["version"]
    return {
        "text": f"sweep {sweep} completed: {said.headline}; {said.sentence}",
        "chosen": choice.arm,
        "setting": choice.best.label,
        "arms": len(arms),
        "stopped": len(choice.stopped),
        "metric": choice.metric,
        "value": choice.best.value,
        "gain": gain.mean,
        "gain_low": gain.low,
        "gain_high": gain.high,
        "model": model,
        "version": version,
        "version_url": version_address(model, version),
        "report": str(sweep_folder(sweep) / PAGE),
    }


def _announce_end(kind: str, name: str, ended: str, reason: str, flow_run_id: str, figures: Mapping[str, Any]) -> None:
    folders = [sweep_folder(name)] if kind == "sweep" else _trainings(run_folder(name))
    payload = {kind: name, "ended": ended, "reason": reason, "flow_run_url": flow_run_page(flow_run_id)}
    payload |= {"text": f"{kind} {name} {ended}: {reason}", **figures, **_address(folders)}
    flow_run = {"prefect.resource.id": f"prefect.flow-run.{flow_run_id}", "prefect.resource.role": "flow-run"}
    announce(f"grpo.{kind}.{ended}", kind, name, payload, [{**flow_run, "prefect.resource.name": name}])


def announce_training(run: Path, config: RunConfig, ended: str, reason: str) -> None:
    """Emit grpo.training.completed, failed or stopped (by a signal)."""
    payload: dict[str, Any] = {"run": run.name, "ended": ended, "reason": reason}
    payload["text"] = f"training of {run.name} {ended}: {reason}"
    payload |= _address(_trainings(run))
    if ended == "completed":
        payload |= _if_known(lambda: _training_figures(run, config))
    announce(f"grpo.training.{ended}", "run", run.name, payload)


def _training_figures(run: Path, config: RunConfig) -> dict[str, Any]:
    result = TRAIN.read_receipt(run)
    return {
        **{name: result[name] for name in ("stopped_early_at_step", "best_step", "train_seconds")},
        "updates": result["counted"]["updates"],
        "planned_updates": result["planned"]["updates"],
        **_cost(training_cost(TRAIN.path(run), config)),
    }


def _if_known(figures: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the figures; none if they cannot be read, since an event must not fail work that is done."""
    try:
        return figures()
    except Exception as error:
        get_run_logger().warning("the event of this end has no figures: %r", error)
        return {}


def run_figures(run: Path, config: RunConfig) -> dict[str, Any]:
    """Results of a run whose stages are all done: verdict, figures on the held-out prompts, cost, model version."""
    report = EVALUATE.read_receipt(run)
    metric, rival = figures.metric_of(config, report), rival_of(report)
    found, said = report["sets"][HELD_OUT], headline(report, metric)
    own, gain = found["policies"]["trained"][metric], found["differences"][rival][metric]
    cost = run_cost(run, config)
    registered = REGISTER.read_receipt(run)
    model, version = registered["model_name"], registered["version"]
    achieved = f"{metric} {figures.amount(metric, own['mean'])} {figures.interval(metric, own)}"
    spent = ", ".join(f"{what} {figure}" for what, figure in cost.rows())
    return {
        "text": f"run {run.name} completed: {said.headline}; {achieved}; {spent}",
        "verdict": said.headline,
        "result": said.tone,
        "metric": metric,
        "value": own["mean"],
        "low": own["low"],
        "high": own["high"],
        "against": rival,
        "gain": gain["mean"],
        "gain_low": gain["low"],
        "gain_high": gain["high"],
        "p_value": gain["p_value"],
        **_cost(cost),
        "model": model,
        "version": version,
        "version_url": version_address(model, version),
        "report": str(EVALUATE.path(run) / PAGE),
    }


def _cost(cost: Cost) -> dict[str, float]:
    return {name.removeprefix("cost/"): value for name, value in cost.metrics.items()}


def _trainings(run: Path) -> list[Path]:
    return [TRAIN.partial(run), TRAIN.path(run)]


def _address(folders: Sequence[Path]) -> dict[str, str]:
    """Address of the run in MLflow that the first of these folders names, if one does."""
    known = [folder for folder in folders if read_json(folder / RUN_FILE)]
    return {"mlflow_url": run_address(known[0])} if known else {}


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return shortened(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
