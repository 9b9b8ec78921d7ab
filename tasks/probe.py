"""The stage probe: how often the base model solves each training prompt, in supervised processes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.client.schemas.objects import State

from grpo_core.config.run import RunConfig
from grpo_core.run_files import DEMONSTRATIONS
from tasks.processes.launch import launch_with_restarts
from tasks.processes.training_machine import check_training_machine
from tasks.processes.vllm_servers import gpus_and_servers
from tasks.rendering.markdown import table
from tasks.stages.run import Context, run_stage
from tasks.stages.table import PROBE
from tasks.tracking.artifacts import show_markdown

BAR = 40  # characters of the longest bar


@task(name="probe")
def probe(run: Path, config: RunConfig, force: bool = False) -> State[None]:
    return run_stage(PROBE, run, config, _work, force)


def _work(context: Context) -> dict[str, Any]:
    check_training_machine(context.config)
    config, log = context.config, get_run_logger()
    command = ["-m", "grpo_core.probe", str(context.run), "--output", str(context.partial)]
    with gpus_and_servers(context, log) as addresses:
        launch_with_restarts(config, command, log, context.partial, addresses)
    report = json.loads((context.partial / PROBE.receipt).read_text())
    said = [*sentences(report, config.data.curriculum.probe)]
    if config.warm_start.from_probe:
        said.append("The warm start trains on {rows:,} right completions.".format(**report[DEMONSTRATIONS]))
    for sentence in said:
        log.info(sentence)
    parts = ["# Pass rates of the base model", *said, table(histogram(report))]
    description = "How often the base model solves each training prompt"
    show_markdown("pass-rates", "\n\n".join(parts) + "\n", description)
    return report


def sentences(report: Mapping[str, Any], completions: int) -> Iterator[str]:
    """Describe the probe's findings in sentences."""
    scored, never, always = report["scored"], report["never"], report["always"]
    if not scored:
        yield f"No completion of the {report['prompts']:,} prompts was scored, so there are no pass rates."
        return
    yield (
        f"Of {scored:,} prompts with {completions} completions each, the base model never solves {never:,} "
        f"({never / scored:.0%}) and always solves {always:,} ({always / scored:.0%}); the mean pass rate is "
        f"{report['mean']:.0%}."
    )
    if missing := report["prompts"] - scored:
        yield f"{missing:,} prompts have no rate: none of their completions was scored."
    if never + always:
        yield (
            "Nothing is learnt from the group of a prompt that is never or always solved: data.curriculum.kind = "
            "'band' leaves such prompts out, 'variance' takes them less often."
        )


def histogram(report: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows of a table: prompts by their pass rate, in tenths."""
    yield ["pass rate", "prompts", ""]
    most = max(report["histogram"]) or 1
    for place, count in enumerate(report["histogram"]):
        yield [f"{place / 10:.0%} to {(place + 1) / 10:.0%}", f"{count:,}", "█" * round(BAR * count / most)]
