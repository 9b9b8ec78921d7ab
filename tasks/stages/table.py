"""The table of stages, in the order in which they run. All code that handles stages reads it: the pipeline, the
hand-over to GPU machines, the deployments, the command line, lineage and reports.

To add a stage, write its entry here, its task, its deployments in prefect.yaml and docs/how-to/work-pools/*.yaml, and
its documentation.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_core import run_files
from grpo_core.config.evaluation import HELD_OUT
from grpo_core.config.run import RunConfig
from grpo_core.fingerprint import content_hash, planned_values
from tasks.rendering import figures
from tasks.stages.dependencies import Named, Parts, hash_values
from tasks.stages.files import read_json

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

Receipt = Mapping[str, Any]
GPU_DEPLOYMENT = "GRPO_GPU_DEPLOYMENT"  # if set to NAME, the pipeline hands STAGE over to the deployment STAGE/NAME


@dataclass(frozen=True)
class Stage:
    """A step of the pipeline: reads the configuration and earlier outputs, writes its own output."""

    name: str
    """Name of the stage; `NAME_run` is its flow."""
    task: str
    """The Prefect task that does the work, as MODULE:FUNCTION; imported when it is needed."""
    meaning: str
    """What the stage does to a run, in one sentence."""
    output: str
    """Path of the output, relative to the run directory."""
    depends_on: Callable[[Parts], Named]
    """The parts of the configuration that determine the output, including those of all stages before."""
    key_figure: Callable[[RunConfig, Receipt], str]
    """Gives the figure that `grpo status` shows, from the receipt."""
    receipt: str = ""
    """The JSON file in the output with the lineage key; "" if the output itself is that file."""
    gpu: bool = False
    """True: run it on a machine with a GPU, if there is such a deployment (GPU_DEPLOYMENT)."""
    resumable: bool = False
    """True: an interrupted attempt leaves an unfinished output, which the next attempt continues."""
    reads: tuple[Stage, ...] = ()
    """The stages whose output it reads, if the run has them."""
    unused: Callable[[RunConfig], Collection[Stage]] = lambda config: ()
    """Gives those of `reads` that a configuration ignores."""
    asked_by: str = ""
    """The configuration key that, if set, gives a run this stage; "": every run has it."""
    example: int | str | tuple[str, ...] = ""
    """A value of that key; a tuple for a list."""
    prompts: Callable[[RunConfig], Collection[str]] = lambda config: ()
    """Gives the validated data sets that it reads."""
    content: Callable[[Path, Receipt], str | dict[str, str]] | None = None
    """Gives the identity of the output (a hash), or of each data set in it, from the output and its receipt. Outputs
    with the same identity are interchangeable. None: every output counts as new."""
    files: Callable[[RunConfig, Receipt], Collection[str]] = lambda config, receipt: ()
    """Gives the files of the output that other stages read, except the receipt."""

    def is_asked(self, config: RunConfig) -> bool:
        """True if a run has this stage."""
        return not self.asked_by or bool(reduce(getattr, self.asked_by.split("."), config))

    def inputs(self, config: RunConfig) -> tuple[Stage, ...]:
        """The stages whose output it reads in a run."""
        unused = self.unused(config)
        return tuple(read for read in self.reads if read.is_asked(config) and read not in unused)

    def path(self, run: Path) -> Path:
        return run / self.output

    def partial(self, run: Path) -> Path:
        """Path at which the output is made, until it is complete."""
        return run / run_files.unfinished(self.output)

    def receipt_path(self, run: Path) -> Path:
        return self.path(run) / self.receipt

    def read_receipt(self, run: Path) -> dict[str, Any]:
        """Read the stage's figures; empty if it has not been done, or if the file is damaged."""
        return read_json(self.receipt_path(run))

    def load_task(self) -> Callable[..., State[None]]:
        return pkgutil.resolve_name(self.task)


def _gain(config: RunConfig, receipt: Receipt) -> str:
    metric = figures.metric_of(config, receipt)
    found = receipt["sets"][HELD_OUT]["differences"]["base"][metric]
    return f"{metric} {figures.gain(metric, found)} {figures.interval(metric, found)}"


def _data_sets(receipt: Receipt) -> list[str]:
    """The data sets that validate has written."""
    return [*receipt["num_prompts"], *(name for name in [run_files.DEMONSTRATIONS] if name in receipt)]


def _content_of_data_sets(output: Path, receipt: Receipt) -> dict[str, str]:
    """Hash of each data set that validate has written, with the images that its rows number."""
    images = [content_hash(str(output / run_files.IMAGES))] if "images" in receipt else []
    own = {name: content_hash(str(output / f"{name}.parquet")) for name in _data_sets(receipt)}
    return {name: hash_values(it, *images) if images else it for name, it in own.items()}


def _probed(receipt: Receipt) -> list[str]:
    """The files that the probe has written."""
    return [run_files.PASS_RATES, *(run_files.SHOWN.name for name in [run_files.DEMONSTRATIONS] if name in receipt)]


def _probe_content(output: Path, receipt: Receipt) -> str:
    """Hash of the probe's files."""
    first, *others = (content_hash(str(output / name)) for name in _probed(receipt))
    return hash_values(first, *others) if others else first  # a probe without completions keeps its identity


VALIDATE = Stage(
    name="validate",
    task="tasks.validate:validate",
    meaning="Check the run's prompts and rewards against the data contract.",
    output=run_files.DATASET,
    receipt=run_files.REPORT,
    depends_on=lambda parts: (
        parts.prompts
        | parts.reward_limits
        | parts.environment_limits
        | parts.evaluated_length
        | parts.evaluation_sets
        | parts.demonstrations
        | parts.shown
    ),
    key_figure=lambda config, receipt: (
        f"{receipt['num_prompts']['train']:,} + {receipt['num_prompts']['eval']:,} prompts"
    ),
    content=_content_of_data_sets,
    files=lambda config, receipt: [
        *(f"{name}.parquet" for name in _data_sets(receipt)),
        *(name for name in [run_files.IMAGES] if "images" in receipt),
    ],
)
PROBE = Stage(
    name="probe",
    task="tasks.probe:probe",
    meaning="Measure how often the run's base model solves each training prompt.",
    output=run_files.PROBE,
    receipt=run_files.REPORT,
    depends_on=lambda parts: parts.prompts | parts.model | parts.probe,
    key_figure=lambda config, receipt: (
        f"{receipt['never']:,} of {receipt['scored']:,} prompts never solved, {receipt['always']:,} always"
    ),
    gpu=True,
    reads=(VALIDATE,),
    asked_by="data.curriculum.probe",
    example=4,
    prompts=lambda config: ("train",),
    content=_probe_content,
    files=lambda config, receipt: _probed(receipt),
)
PLAN = Stage(
    name="plan",
    task="tasks.plan:plan",
    meaning="Plan the run: steps, memory, time.",
    output=run_files.PLAN,
    depends_on=lambda parts: (
        parts.steps | parts.order | parts.model | parts.memory | parts.curriculum | parts.warm_start
    ),
    key_figure=lambda config, receipt: f"{receipt['plan']['max_steps']:,} updates planned",
    reads=(VALIDATE, PROBE),
    prompts=lambda config: ("train",),
    content=lambda output, receipt: hash_values(planned_values(receipt["plan"])),  # no stage reads the forecasts
)
WARM_START = Stage(
    name="warm-start",
    task="tasks.warm_start:warm_start",
    meaning="Train the run's base model on demonstrations; its training begins from there.",
    output=run_files.WARM_START,
    receipt=run_files.RESULT,
    depends_on=lambda parts: parts.supervised,
    key_figure=lambda config, receipt: (
        f"{receipt['counted']['updates']:,} updates, loss {receipt['metrics']['loss']:.3f}"
    ),
    gpu=True,
    resumable=True,
    reads=(VALIDATE, PROBE),
    unused=lambda config: (VALIDATE,) if config.warm_start.from_probe else (PROBE,),
    asked_by="warm_start.demonstrations",
    example="demonstrations.jsonl",
    prompts=lambda config: (run_files.DEMONSTRATIONS,),
    content=lambda output, receipt: content_hash(str(output / run_files.MODEL)),
    files=lambda config, receipt: (run_files.MODEL, *([run_files.ADAPTER] if config.model.use_peft else [])),
)
TRAIN = Stage(
    name="train",
    task="tasks.train:train",
    meaning="Train the run's policy; an unfinished training continues from its last checkpoint.",
    output=run_files.TRAINING,
    receipt=run_files.RESULT,
    depends_on=lambda parts: parts.policy,
    key_figure=lambda config, receipt: f"{receipt['counted']['updates']:,} updates",
    gpu=True,
    resumable=True,
    reads=(VALIDATE, PROBE, PLAN, WARM_START),
    unused=lambda config: () if config.data.curriculum.begins_with_probe else (PROBE,),
    prompts=lambda config: ("train", "eval") if config.train.eval_steps else ("train",),
)
EVALUATE = Stage(
    name="evaluate",
    task="tasks.evaluate:evaluate",
    meaning="Evaluate the run's base model and trained policy side by side.",
    output=run_files.EVALUATION,
    receipt=run_files.REPORT,
    depends_on=lambda parts: parts.policy | parts.evaluation,
    key_figure=_gain,
    gpu=True,
    reads=(VALIDATE, PLAN, WARM_START, TRAIN),
    prompts=lambda config: config.evaluation_files.values(),
)
REGISTER = Stage(
    name="register",
    task="tasks.register:register",
    meaning="Register the run's policy as a model version, and ask it held-out prompts.",
    output="registration.json",
    depends_on=lambda parts: parts.policy | parts.evaluation | parts.registration,
    key_figure=lambda config, receipt: f"{receipt['model_name']} version {receipt['version']}",
    reads=(PLAN, TRAIN, EVALUATE),
)
PUBLISH = Stage(
    name="publish",
    task="tasks.publish:publish",
    meaning="Export the run's registered policy, and compare each export with it.",
    output=run_files.PUBLISHED,
    receipt=run_files.REPORT,
    depends_on=lambda parts: parts.policy | parts.evaluation | parts.registration | parts.section("publish"),
    key_figure=lambda config, receipt: "; ".join(
        f"{name} {'kept' if export['kept'] else 'not shown to be kept'}" for name, export in receipt["exports"].items()
    ),
    gpu=True,
    resumable=True,
    reads=(VALIDATE, PLAN, TRAIN, EVALUATE, REGISTER),
    asked_by="publish.formats",
    example=("bfloat16",),
    prompts=lambda config: config.evaluation_files.values(),
)
STAGES = (VALIDATE, PLAN, TRAIN, EVALUATE, REGISTER)  # of every run
ALL_STAGES = (VALIDATE, PROBE, PLAN, WARM_START, *STAGES[2:], PUBLISH)


def stages_of(config: RunConfig) -> tuple[Stage, ...]:
    """The stages of a run, in their order."""
    return tuple(stage for stage in ALL_STAGES if stage.is_asked(config))
