"""Runs a stage: skips it if its output is up to date, otherwise does its work and publishes the output."""

from __future__ import annotations

import json
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.client.schemas.objects import State
from prefect.exceptions import ExternalSignal
from prefect.states import Cancelled, Completed

from grpo_core.config.run import RunConfig
from grpo_core.errors import GrpoError
from grpo_core.system.files import publish
from tasks.stages.arms import arm_with_output, copy_output
from tasks.stages.condition import MARKER, conditions, identity, refuse_outdated_inputs, saved_progress
from tasks.stages.dependencies import hash_values
from tasks.stages.errors import ArmStopped, Interrupted, StageError
from tasks.stages.files import read_json, remove, set_aside, write_text
from tasks.stages.lineage import DIGITS, lineage_inputs, lineage_keys
from tasks.stages.mlflow_address import describe, tracking_errors
from tasks.stages.prefect_address import describe_server_failure
from tasks.stages.table import Stage

SKIPPED = "Skipped"  # name of the state of a stage that was up to date
ERRORS = "errors.log"  # in the run directory: the errors that ended its stages, with tracebacks


@dataclass(frozen=True)
class Context:
    """Paths and settings that a stage works with. `partial`: where it writes, renamed to the final name when the stage
    succeeds; `force`: do not reuse any existing output."""

    config: RunConfig
    run: Path
    partial: Path
    force: bool = False


def run_stage(
    stage: Stage, run: Path, config: RunConfig, work: Callable[[Context], dict[str, Any]], force: bool = False
) -> State[None]:
    """Do `work` unless the output is up to date; with `force`, do it in any case.

    `work` fills `Context.partial` and returns the receipt's content, to which its duration in seconds is added. A
    resumable stage finds there what an interrupted attempt with the same key left; any other starts with an empty
    folder. The output that is replaced is kept.

    Raises StageError if the input is outdated, if the work refuses by a GrpoError, or if storage, MLflow or Prefect's
    server fails. The traceback of every error that ends the stage is written to the run's ERRORS. A signal gives the
    state Cancelled, whose result raises Interrupted; an arm that fell behind gives it too, and its result raises
    ArmStopped.
    """
    try:
        return _run_stage(stage, run, config, work, force)
    except (KeyboardInterrupt, ExternalSignal) as signal:
        interrupted = describe_interruption(stage, run, config, signal)
        return Cancelled(message=str(interrupted), data=interrupted)
    except ArmStopped as stopped:
        return Cancelled(message=str(stopped), data=stopped)
    except Exception as error:
        _write_traceback(stage, run, error)
        if isinstance(error, GrpoError) and not isinstance(error, StageError):
            raise StageError(str(error)) from error
        if sentence := _advice(error):
            raise StageError(f"{stage.name}: {sentence}") from error
        raise


def describe_interruption(stage: Stage, run: Path, config: RunConfig, signal: BaseException) -> Interrupted:
    """Make the error of a stage that a signal ended; it says what is saved."""
    saved = saved_progress(stage, run, lineage_keys(config)[stage.name])
    return Interrupted(f"{stage.name} was interrupted" + (f", {saved}" if saved else ""), signal)


def _write_traceback(stage: Stage, run: Path, error: Exception) -> None:
    """Append the traceback to the run's ERRORS. If the storage refuses that too, do nothing: the error itself matters
    more."""
    with suppress(OSError), (run / ERRORS).open("a") as file:
        file.write(f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z} {stage.name}\n")
        file.write("".join(traceback.format_exception(error)) + "\n")


def _run_stage(
    stage: Stage, run: Path, config: RunConfig, work: Callable[[Context], dict[str, Any]], force: bool
) -> State[None]:
    log, of_stages, final = get_run_logger(), lineage_inputs(config), stage.path(run)
    inputs, now = of_stages[stage.name], conditions(run, config, of_stages)
    key = hash_values(inputs)
    if now[stage.name].is_up_to_date and not force:
        log.info("%s: up to date (lineage %s), skipped", stage.name, key[:DIGITS])
        return Completed(name=SKIPPED, message=f"{final.name} already has lineage key {key}")
    refuse_outdated_inputs(stage, run, config, now, force)
    log.info("%s: %s", stage.name, now[stage.name].reason or "up to date, made again as asked")
    partial = stage.partial(run)
    made_from = {read.name: identity(read.read_receipt(run), stage.prompts(config)) for read in stage.inputs(config)}
    origin = {"lineage_key": key, "made_from": made_from}
    _prepare(stage, partial, origin)
    start = time.monotonic()
    other = None if force else arm_with_output(stage, run, config, origin)
    if other:
        log.info("%s: the same as that of %s, taken over", stage.name, other.name)
        receipt = copy_output(stage, other, partial)
    else:
        receipt = work(Context(config, run, partial, force))
    seconds = round(time.monotonic() - start, 3)
    made = stage.content(partial, receipt) if stage.content else uuid.uuid4().hex
    facts = {"made": made, "made_at": time.time(), "seconds": seconds, **receipt}
    text = json.dumps({**origin, **facts, "inputs": inputs}, indent=2) + "\n"
    write_text(partial / stage.receipt if stage.receipt else partial, text)
    set_aside(final, stage.read_receipt(run).get("lineage_key", "unknown"))
    publish(partial, final)
    return Completed(message=f"wrote {final.name} (lineage {key[:DIGITS]})")


def _prepare(stage: Stage, partial: Path, origin: Mapping[str, Any]) -> None:
    """Prepare the folder that the stage writes into: as an interrupted attempt with the same key left it, or empty."""
    if stage.resumable and partial.exists():
        left = read_json(partial / MARKER)
        if left == origin:
            return
        set_aside(partial, left.get("lineage_key", "unknown"))
    remove(partial)
    if stage.receipt:
        partial.mkdir()
    if stage.resumable:
        write_text(partial / MARKER, json.dumps(origin))


def _advice(error: Exception) -> str:
    """Return the cause and what to do, in a sentence, if MLflow, Prefect's server or the storage failed; "" for any
    other error."""
    if isinstance(error, tracking_errors()):
        return describe(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename or 'storage'}; solve that, then run the same again"
    return describe_server_failure(error)
