"""`grpo data check`: check data alone against the contract. `grpo data schema`: write that contract to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.terminal import refusals, refuse, say, set_option
from grpo_core.config.files import load_config
from grpo_core.errors import ConfigError
from grpo_core.system.libraries import quiet_libraries

app = typer.Typer(no_args_is_help=True, help="The contract that a run's data must keep, and checks against it.")
Overrides = Annotated[list[str] | None, set_option()]


@app.command("check")
def check_data(
    file: Annotated[Path, typer.Argument(help="run configuration (TOML), whose data are checked; or a data file")],
    schema: Annotated[
        Path | None, typer.Option(help="contract (YAML), as `grpo data schema` writes it, to check a data file against")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Check data against the contract, and run nothing.

    Exit status 2: they break it.
    """
    quiet_libraries()
    with refusals(str(file)):
        if file.suffix == ".toml":
            if schema:
                raise ConfigError("--schema is for a data file; a configuration names one in data.schema")
            _check_run(file, overrides)
        elif schema is None:
            raise ConfigError(
                "a data file is checked against a contract: give it by --schema, or a run configuration (.toml)"
            )
        else:
            _check_file(file, schema)


@app.command("schema")
def write_schema(
    config: Annotated[Path, typer.Argument(help="run configuration (TOML)")],
    source: Annotated[
        str | None, typer.Option(help="if there are several data.sources, the one whose contract is written")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Write the data contract of a run as YAML: columns, types and rules, as the data sets must have them."""
    quiet_libraries()
    with refusals(str(config)):
        run = load_config(config, overrides)
        from grpo_core.rewards.contract import rewards_of
        from tasks.data.contract_file import contract_as_yaml

        origins = dict(zip(run.evaluated_sources or [None], run.data.origins.values(), strict=True))
        if source not in origins:
            names = ", ".join(run.evaluated_sources)
            if source is None:
                raise ConfigError(
                    f"each of data.sources has a contract of its own: choose one by --source, one of {names}"
                )
            raise ConfigError(
                f"--source {source}: "
                + (f"no such source; it is one of {names}" if names else "there are no data.sources; leave it out")
            )
        rewards = [reward for reward in rewards_of(run) if reward.name in run.rewards_of(source)]
        typer.echo(contract_as_yaml(run.data, origins[source], rewards, run.teacher.columns), nl=False)


def _check_run(file: Path, overrides: list[str] | None) -> None:
    run = load_config(file, overrides)
    from tasks.data.path_or_hub import check_places
    from tasks.reports.data_report import images_text
    from tasks.screen import refusal, screen
    from tasks.stages.base_model import with_checkpoint
    from tasks.validate import too_few_groups

    check_places(run)
    run = with_checkpoint(run, say)
    screened = screen(run)
    if screened.refused:
        refuse(refusal(screened))
    for found in screened.report["findings"]:
        done = {"warn": "kept", "drop": "left out"}[found["severity"]]
        say(f"{found['dataset']}: {found['rows']:,} rows break {found['check']} ({found['rule']}); they are {done}")
    for note in [*screened.notes, *too_few_groups(run, screened.report)]:
        say(note)
    if "images" in screened.report:
        say(images_text(screened.report["images"]))
    for name, count in screened.report["num_prompts"].items():
        groups = screened.report["num_groups"].get(name)
        of_groups = f", in {groups:,} groups by {run.evaluation.group_column}" if groups is not None else ""
        say(f"{name}: {count:,} of {screened.report['rows_read'][name]:,} rows keep the contract{of_groups}")


def _check_file(file: Path, contract: Path) -> None:
    from tasks.data.own_schema import hold_against, read_schema
    from tasks.data.sources import Source, load_source

    schema = read_schema(contract)
    rows = load_source(Source("FILE", str(file)))
    if not rows.height:
        refuse("it has no rows")
    problems, findings = hold_against({file.name: rows}, schema)
    lines = [f"row {row}, column {column!r}: {value}" for _, row, column, _, value, _ in findings.head(10).rows()]
    if broken := findings["row"].n_unique():
        lines.append(f"{broken:,} of {rows.height:,} rows break {contract}")
    if problems or lines:
        refuse("\n".join([*problems, *lines]))
    say(f"{rows.height:,} rows keep {contract}")
