"""What the stages are, which of them are up to date, and how each runs: skipped when it is, else done and published.

Prefect is imported by what runs a stage, so that `grpo status` answers without it.
"""

from __future__ import annotations

import json
import re
import time
import traceback
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from grpo_core.config.files import load_config
from grpo_core.config.run import RunConfig
from grpo_core.errors import GrpoError
from grpo_core.fingerprint import content_hash
from grpo_core.system.files import publish
from tasks.stages.lineage import key_of, lineage_inputs, lineage_keys, what_changed
from tasks.stages.outages import advice
from tasks.stages.run_directory import read_json, remove, set_aside, write_text

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

MARKER = "lineage.json"  # in an unfinished output: what it is being made from
ERRORS = "errors.log"  # in the run directory: what ended its stages, with tracebacks
CHANGES_NAMED = 3  # of those that make a stage stale


class StageError(GrpoError):
    """A stage that failed for a reason a person can act on; the message says which."""


class Interrupted(GrpoError):
    """A stage or flow that a signal ended; the message says what is saved. `signal`: what was raised for it."""

    def __init__(self, message: str, signal: BaseException):
        super().__init__(message)
        self.signal = signal


@dataclass(frozen=True)
class Context:
    """What a stage works with. `partial`: where it writes; renamed to its final name when the stage succeeds."""

    config: RunConfig
    run: Path
    partial: Path


@dataclass(frozen=True)
class Stage:
    """`output`: under the run directory; `receipt`: the JSON in it that carries the lineage key, or "" for itself.

    `reads`: the stages whose output it works on, `prompts`: which of the data sets, where validate is among them.
    `content`: what its output is known by, given the output and the receipt's content, and be it data set by data set;
    None where no two makings are the same, so that each is known by itself. `files`: those of its output that other
    stages read, beside the receipt, given the receipt's content.
    """

    name: str
    output: str
    receipt: str = ""
    resumable: bool = False
    reads: tuple[Stage, ...] = ()
    prompts: Callable[[RunConfig], Collection[str]] = lambda config: ()
    content: Callable[[Path, Mapping[str, Any]], str | dict[str, str]] | None = None
    files: Callable[[Mapping[str, Any]], Collection[str]] = lambda receipt: ()

    def path(self, run: Path) -> Path:
        return run / self.output

    def partial(self, run: Path) -> Path:
        """Where the output is made, until it is whole."""
        return run / f"{self.output}.partial"

    def receipt_path(self, run: Path) -> Path:
        return self.path(run) / self.receipt

    def read_receipt(self, run: Path) -> dict[str, Any]:
        """The stage's figures; empty when it has not been done, or the file is damaged."""
        return read_json(self.receipt_path(run))


def _prompt_files(receipt: Mapping[str, Any]) -> list[str]:
    return [f"{name}.parquet" for name in receipt["num_prompts"]]


def _prompts(output: Path, receipt: Mapping[str, Any]) -> dict[str, str]:
    return {name: content_hash(str(output / f"{name}.parquet")) for name in receipt["num_prompts"]}


def _trained_on(config: RunConfig) -> Collection[str]:
    return ("train", "eval") if config.train.eval_steps else ("train",)


def _evaluated_on(config: RunConfig) -> Collection[str]:
    return config.evaluation_files.values()


def _figures(output: Path, receipt: Mapping[str, Any]) -> str:
    return key_of(receipt["plan"])  # its forecasts are read by nobody but people


VALIDATE = Stage("validate", "dataset", "report.json", content=_prompts, files=_prompt_files)
PLAN = Stage("plan", "plan.json", reads=(VALIDATE,), prompts=lambda config: ("train",), content=_figures)
TRAIN = Stage("train", "training", "result.json", resumable=True, reads=(VALIDATE, PLAN), prompts=_trained_on)
EVALUATE = Stage("evaluate", "evaluation", "report.json", reads=(VALIDATE, TRAIN), prompts=_evaluated_on)
REGISTER = Stage("register", "registration.json", reads=(PLAN, TRAIN, EVALUATE))
STAGES = (VALIDATE, PLAN, TRAIN, EVALUATE, REGISTER)


@dataclass(frozen=True)
class Condition:
    """Whether a stage's output is what the run's configuration and inputs give now, and why not."""

    state: Literal["up to date", "stale", "missing"]
    reason: str = ""

    @property
    def is_up_to_date(self) -> bool:
        return self.state == "up to date"


def conditions(run: Path) -> dict[str, Condition]:
    """Each stage's condition: those not up to date are what the pipeline would do.

    A stage is stale when its lineage key is no longer the one of configuration and inputs, or when a stage that it was
    made from has been made again since, or is going to be.
    """
    config = load_config(run / "config.toml")
    inputs = lineage_inputs(config)
    receipts = {stage.name: stage.read_receipt(run) for stage in STAGES}
    found: dict[str, Condition] = {}
    for stage in STAGES:
        saved = _saved(stage, run, key_of(inputs[stage.name]))
        if receipt := receipts[stage.name]:
            reason = _why_stale(stage, receipt, config, inputs, receipts) or _why_soon_stale(stage, found)
            gone = [name for name in stage.files(receipt) if not (stage.path(run) / name).exists()]
            if gone:
                found[stage.name] = Condition("missing", f"{', '.join(gone)} is gone")
            elif reason:
                found[stage.name] = Condition("stale", f"{reason}; {saved}" if saved else reason)
            else:
                found[stage.name] = Condition("up to date")
        else:
            found[stage.name] = Condition("missing", saved or "not done yet")
    return found


def made_at(stage: Stage, run: Path) -> float:
    """When the stage was done, in seconds since 1970. Without it in the receipt: when the receipt was written here."""
    return stage.read_receipt(run).get("made_at") or stage.receipt_path(run).stat().st_mtime


def _saved(stage: Stage, run: Path, key: str) -> str:
    """How far an unfinished training is that the next attempt continues; "" without one."""
    partial = stage.partial(run)
    if not stage.resumable or read_json(partial / MARKER).get("lineage_key") != key:
        return ""
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in partial.glob("checkpoints/*"))
    newest = max((int(name[1]) for name in names if name), default=0)
    planned = PLAN.read_receipt(run).get("plan", {}).get("max_steps")
    return f"{newest} of {planned} updates saved" if newest and planned else ""


def run_stage(stage: Stage, run: Path, work: Callable[[Context], dict[str, Any]], force: bool = False) -> State[None]:
    """Do `work` unless the output is up to date, or in any case with `force`; StageError when what it reads is not.

    `work` fills `Context.partial` and returns the receipt's content, which gets the seconds that it took. A stage that
    is `resumable` finds what an interrupted attempt at the same left there; any other starts empty. What is replaced is
    kept.

    Storage or MLflow that fails is a StageError too. Whatever error ends the stage, the run's ERRORS has its traceback.
    A signal gives the state Cancelled, whose result raises Interrupted.
    """
    from prefect.exceptions import ExternalSignal
    from prefect.states import Cancelled

    try:
        return _run_stage(stage, run, work, force)
    except (KeyboardInterrupt, ExternalSignal) as signal:
        saved = _saved(stage, run, lineage_keys(load_config(run / "config.toml"))[stage.name])
        message = f"{stage.name} was interrupted" + (f", {saved}" if saved else "") + "; run the same again to go on"
        return Cancelled(message=message, data=Interrupted(message, signal))
    except Exception as error:
        _note_down(stage, run, error)
        if sentence := advice(error):
            raise StageError(f"{stage.name}: {sentence}") from error
        raise


def _note_down(stage: Stage, run: Path, error: Exception) -> None:
    """Append the traceback to the run's ERRORS, if the storage takes it: the error itself is what counts."""
    with suppress(OSError), (run / ERRORS).open("a") as file:
        file.write(f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z} {stage.name}\n")
        file.write("".join(traceback.format_exception(error)) + "\n")


def _run_stage(stage: Stage, run: Path, work: Callable[[Context], dict[str, Any]], force: bool) -> State[None]:
    from prefect import get_run_logger
    from prefect.states import Completed

    config = load_config(run / "config.toml")
    key = lineage_keys(config)[stage.name]
    now = conditions(run)
    final = stage.path(run)
    if now[stage.name].is_up_to_date and not force:
        get_run_logger().info("%s: up to date (lineage %s), skipped", stage.name, key[:12])
        return Completed(name="Skipped", message=f"{final.name} already has lineage key {key}")
    refuse_outdated_inputs(stage, run, force)
    get_run_logger().info("%s: %s", stage.name, now[stage.name].reason or "up to date, made again as asked")
    partial = stage.partial(run)
    made_from = {read.name: _made(read.read_receipt(run), stage.prompts(config)) for read in stage.reads}
    origin = {"lineage_key": key, "made_from": made_from}
    _prepare(stage, partial, origin)
    start = time.monotonic()
    receipt = work(Context(config, run, partial))
    seconds = round(time.monotonic() - start, 3)
    made = stage.content(partial, receipt) if stage.content else uuid.uuid4().hex
    facts = {"made": made, "made_at": time.time(), "seconds": seconds, **receipt}
    text = json.dumps({**origin, **facts, "inputs": lineage_inputs(config)[stage.name]}, indent=2) + "\n"
    write_text(partial / stage.receipt if stage.receipt else partial, text)
    set_aside(final, stage.read_receipt(run).get("lineage_key", "unknown"))
    publish(partial, final)
    return Completed(message=f"wrote {final.name} (lineage {key[:12]})")


def _why_stale(
    stage: Stage,
    receipt: Mapping[str, Any],
    config: RunConfig,
    inputs: Mapping[str, Mapping[str, Any]],
    receipts: Mapping[str, dict[str, Any]],
) -> str:
    """What has changed since `receipt`; "" when nothing that concerns the stage has. `inputs`: of each stage now.

    An input that is up to date has to be what the stage was made from. One that is not will be made again first.
    """
    if receipt.get("lineage_key") != key_of(inputs[stage.name]):
        names = what_changed(receipt.get("inputs", {}), inputs[stage.name])
        others = f" and {len(names) - CHANGES_NAMED} more" if len(names) > CHANGES_NAMED else ""
        return f"changed: {', '.join(names[:CHANGES_NAMED])}{others}" if "inputs" in receipt else "inputs changed"
    for name, then in receipt.get("made_from", {}).items():
        now = receipts[name]
        if now.get("lineage_key") == key_of(inputs[name]) and _made(now, stage.prompts(config)) != then:
            return f"{name} was made again"
    return ""


def _why_soon_stale(stage: Stage, found: Mapping[str, Condition]) -> str:
    """An input that is to be made again, and never comes out the same. Of the others, it depends on what they give."""
    outdated = (read.name for read in stage.reads if read.content is None and not found[read.name].is_up_to_date)
    return next((f"{name} is {found[name].state}" for name in outdated), "")


def _made(receipt: Mapping[str, Any], prompts: Collection[str]) -> Any:
    """What an output is known by; of one that is known data set by data set, what `prompts` are."""
    made = receipt.get("made")
    return {name: made.get(name) for name in prompts} if isinstance(made, dict) else made


def refuse_outdated_inputs(stage: Stage, run: Path, force: bool = False) -> None:
    """StageError with the commands to run first if the stage is to work on what is not up to date."""
    now = conditions(run)
    outdated = _outdated(stage, now)
    if not outdated or (now[stage.name].is_up_to_date and not force):
        return
    lines = [
        f"  grpo stage {read.name} --run {run.name}    # {now[read.name].state}: {now[read.name].reason}"
        for read in STAGES
        if read in outdated
    ]
    raise StageError(
        f"{stage.name} of run {run.name!r} would work on what is outdated; first run, in this order:\n"
        + "\n".join(lines)
        + f"\nor everything that is not up to date: grpo run {run / 'config.toml'}"
    )


def _outdated(stage: Stage, now: Mapping[str, Condition]) -> list[Stage]:
    """The stages to run before this one."""
    direct = [read for read in stage.reads if not now[read.name].is_up_to_date]
    return [*direct, *(further for read in direct for further in _outdated(read, now))]


def _prepare(stage: Stage, partial: Path, origin: Mapping[str, Any]) -> None:
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
