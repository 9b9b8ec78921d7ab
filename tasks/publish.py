"""The stage publish: exports the registered policy, compares each export with it, and pushes what is not worse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.client.schemas.objects import State

from grpo_core import run_files
from grpo_core.config.run import RunConfig
from grpo_core.fingerprint import content_hash
from tasks.processes.launch import launch_with_restarts
from tasks.processes.training_machine import check_training_machine
from tasks.processes.vllm_servers import gpus_and_servers
from tasks.publishing.card import write_card
from tasks.publishing.formats import check_formats, write_format
from tasks.publishing.hub import check_hub, push, repository_of
from tasks.publishing.verdict import SAME, rows, verdict
from tasks.rendering.markdown import escape, table
from tasks.stages.files import read_json, remove, write_text
from tasks.stages.run import Context, run_stage
from tasks.stages.table import PUBLISH, REGISTER, TRAIN
from tasks.tracking.artifacts import show_markdown
from tasks.tracking.runs import answering, commit_text, connect, read_tracking_run, trained_on_commit


@task(name="publish")
def publish(run: Path, config: RunConfig, force: bool = False) -> State[None]:
    return run_stage(PUBLISH, run, config, _work, force)


def _work(context: Context) -> dict[str, Any]:
    config, log, client = context.config, get_run_logger(), connect()
    check_training_machine(config)
    check_formats(config)
    check_hub(config)
    registered, final = REGISTER.read_receipt(context.run), PUBLISH.path(context.run)
    name, version = registered["model_name"], registered["version"]
    with answering():
        commit = commit_text(trained_on_commit(client, read_tracking_run(TRAIN.path(context.run))["run_id"]))
    exports: dict[str, dict[str, Any]] = {}
    for made in config.publish.formats:
        folder, judged = context.partial / made, context.partial / f"{made}.json"
        if context.force or not (export := read_json(judged)):
            export = _export(context, made, folder, log)
            write_text(judged, json.dumps(export))
        repository = repository_of(config.publish, made)
        write_card(folder / "README.md", context.run, config, export, commit, repository)
        log.info("%s: %s", final / made, export["verdict"])
        if repository and export["kept"]:
            export["hub"] = push(folder, repository, f"{name} version {version} of the run {config.name}")
            log.info("%s: pushed, %s", made, export["hub"])
        elif repository:
            log.warning("%s is not pushed to %s, since it is not shown to keep publish.max_drop", made, repository)
        exports[made] = export
    for made, export in exports.items():
        tags = {"folder": final / made, "verdict": export["verdict"], "hub": export.get("hub")}
        for tag, value in tags.items():
            if value:
                client.set_model_version_tag(name, version, f"published.{made}.{tag}", str(value))
    page = "\n\n".join(
        [f"# {escape(name)} version {version}, published", table(rows(exports))]
        + [f"`{final / made}`: {escape(export['verdict'])}." for made, export in exports.items()]
    )
    show_markdown("publication", page + "\n", f"{escape(name)} version {version}: {', '.join(exports)}")
    return {"model_name": name, "version": version, "exports": exports}


def _export(context: Context, made: str, folder: Path, log: Any) -> dict[str, Any]:
    """Write the trained policy in a format, and evaluate it unless all files are the trained policy's."""
    model, dense = TRAIN.path(context.run) / run_files.MODEL, context.partial / "dense"
    output = context.partial / "evaluated"
    for left in (folder, dense, output):  # by an interrupted attempt
        remove(left)
    judged = write_format(made, model, folder, dense, log)
    if (content := content_hash(str(folder))) == content_hash(str(model)):
        return {"kept": True, "verdict": SAME, "content": content, "sets": {}}
    output.mkdir()
    place = replace(context, config=context.config.where_evaluated)
    command = ["-m", "grpo_core.evaluate", str(context.run), "--output", str(output), "--exported", str(judged)]
    with gpus_and_servers(place, log) as addresses:
        launch_with_restarts(place.config, command, log, output, addresses)
    report = json.loads((output / run_files.REPORT).read_text())
    kept, sentence = verdict(report, context.config.publish.max_drop)
    for left in (dense, output):
        remove(left)
    return {"kept": kept, "verdict": sentence, "content": content, **report}
