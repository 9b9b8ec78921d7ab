"""`grpo schedule`: run a preset by a schedule of the pipeline's deployment. (Prefect's own command takes no
parameters.)"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.terminal import refuse, say, set_option
from flows.serving.environment import configure
from flows.serving.find_server import use_running_server
from grpo_core.config.files import DATE, read_values
from tasks.stages.run_directory import storage_root

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.responses import DeploymentResponse


def schedule(
    config: Annotated[
        Path, typer.Argument(help="run configuration (TOML) in configs/, such as configs/quickstart.toml")
    ],
    cron: Annotated[str, typer.Option(help='minute, hour, day, month and weekday, such as "0 2 * * 1-5"')],
    timezone: Annotated[str, typer.Option(help="time zone of --cron, such as Europe/Berlin")] = "UTC",
    overrides: Annotated[list[str] | None, set_option("override one key, such as name=nightly-{date}")] = None,
    deployment: Annotated[
        str | None, typer.Option(help="deployment of the pipeline, such as pipeline/local; default: the only one")
    ] = None,
) -> None:
    """Run a configuration on a schedule, by the pipeline's deployment. The same name again replaces its schedule.

    `{date}` in the name makes a new run each day; without it, the second run is up to date and trains nothing.
    """
    configure()
    if not use_running_server():
        refuse(f"no server is running for {storage_root()}; start `grpo up`, or set PREFECT_API_URL")
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.schedules import CronSchedule
    from prefect.utilities.schema_tools.validation import validate
    from pydantic import ValidationError

    from flows.parameters.allowed import resolve_allowed
    from flows.parameters.form import changes_from_overrides, configs
    from flows.serving.server_setup import prefect_answering

    changes = changes_from_overrides(config, overrides)
    if config.resolve().parent != configs():
        refuse(f"{config}: a deployment runs the files in {configs()}: put it there, or set GRPO_CONFIGS to its folder")
    resolved = resolve_allowed(config.stem, changes)
    try:
        when = CronSchedule(cron=cron, timezone=timezone)
    except ValidationError as error:
        refuse(f"--cron {cron!r} --timezone {timezone!r}: {error.errors()[0]['msg'].removeprefix('Value error, ')}")
    name, parameters = read_values(config, overrides)["name"], {"preset": config.stem, "changes": changes}
    with prefect_answering(), get_client(sync_client=True) as client:
        deployment, known = _find(client, deployment)
        if wrong := validate(parameters, known.parameter_openapi_schema or {}):
            refuse(f"{deployment}: {wrong[0].message}: the machine that serves it has other files in its configs/")
        earlier = next((it for it in known.schedules if it.slug == name), None)
        if earlier:
            client.update_deployment_schedule(known.id, earlier.id, active=True, schedule=when, parameters=parameters)
        else:
            new = DeploymentScheduleCreate(schedule=when, parameters=parameters, slug=name)
            (earlier,) = client.create_deployment_schedules(known.id, [new])
    say(f"{deployment} runs {name} at {cron!r} ({timezone})")
    api = os.environ["PREFECT_API_URL"]  # Prefect's own commands do not find the server of a storage
    say(f"It ends by: PREFECT_API_URL={api} prefect deployment schedule delete {deployment} {earlier.id}")
    if DATE not in name:
        say(f"While nothing changes, only its first run trains. A run per day: --set name={name}-{DATE}")
    elif not resolved.registry.model_name:
        say("Each day's run registers a model of its own. Versions of one: --set registry.model_name=NAME")


def _find(client: SyncPrefectClient, name: str | None) -> tuple[str, DeploymentResponse]:
    """The deployment of the pipeline with this name, or the only one."""
    from prefect.client.schemas.filters import FlowFilter, FlowFilterName

    of_pipeline = FlowFilter(name=FlowFilterName(any_=["pipeline"]))
    served = {f"pipeline/{it.name}": it for it in client.read_deployments(flow_filter=of_pipeline)}
    if not served:
        refuse("the server has no deployment of the pipeline: start `grpo serve`, or deploy to work pools")
    if name is None and len(served) == 1:
        (name,) = served
    if name not in served:
        refuse(f"--deployment {name}: choose one of {', '.join(sorted(served))}")
    return name, served[name]
