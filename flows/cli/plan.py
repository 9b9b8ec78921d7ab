"""`grpo plan`: what a run would do and need, or why it is refused and what would work. Doesn't import torch: if no pace
of training is known, another process measures it on this machine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from flows.cli.terminal import Terminal, option, print_refusal, set_option, table_of
from grpo_core.config.files import load_config, parse_config
from grpo_core.config.rollout import RolloutConfig
from grpo_core.config.run import RunConfig
from grpo_core.config.training import TrainConfig
from grpo_core.errors import ConfigError, GrpoError
from grpo_core.planning.forecast import forecast_rows, useful_groups
from grpo_core.planning.frameworks.launches import RecipeError
from grpo_core.planning.frameworks.megatron import megatron_notes, megatron_plan
from grpo_core.planning.frameworks.recipes import (
    NEWEST,
    RECIPES,
    Recipe,
    System,
    check_no_code,
    megatron_inputs,
    read_recipe,
    recipe_inputs,
)
from grpo_core.planning.plan import Plan, PlanError, make_plan, notes, plan_inputs, plan_rows, source_table
from grpo_core.planning.rules import PlanInputs, Rules

ONE_PROCESS = "the recipe does not say how many processes train: 1 is assumed; give --num-processes"
NO_FILE: dict[str, Any] = {  # keys that a configuration needs and a plan does not
    "name": "plan",
    "model": {"name_or_path": ""},
    "data": {"train": "", "eval": ""},
    "rewards": [{"function": "length"}],
}
File = Annotated[Path | None, typer.Argument(help="run configuration (TOML); with --recipe, another system's recipe")]
Whole = int | None


def plan(
    file: File = None,
    recipe: Annotated[
        System | None, option("the file is a recipe of TRL or Open-R1, or of ms-swift: YAML, launch script or JSON")
    ] = None,
    rules: Annotated[Rules | None, option("batch rules to apply; default: the newest of the recipe's system")] = None,
    num_prompts: Annotated[Whole, option("prompts in the training data; default: counted in the data")] = None,
    num_generations: Annotated[Whole, option("G: completions per prompt")] = None,
    per_device_train_batch_size: Annotated[Whole, option("b: completions per process and micro-step")] = None,
    num_processes: Annotated[Whole, option("W: training processes, one per GPU")] = None,
    gradient_accumulation_steps: Annotated[Whole, option("A: micro-steps per update")] = None,
    steps_per_generation: Annotated[Whole, option("S: micro-steps per generation batch")] = None,
    generation_batch_size: Annotated[Whole, option("completions sampled together, over all processes")] = None,
    num_iterations: Annotated[Whole, option("passes over each generation batch")] = None,
    num_train_epochs: Annotated[float | None, option("passes over the prompts")] = None,
    max_steps: Annotated[Whole, option("updates, whatever the epochs")] = None,
    warmup_steps: Annotated[float | None, option("updates of warm-up; below 1: a share of all")] = None,
    max_completion_length: Annotated[Whole, option("most tokens per completion")] = None,
    per_device_eval_batch_size: Annotated[Whole, option("completions per process, if the recipe evaluates")] = None,
    num_generations_eval: Annotated[Whole, option("completions per prompt, if the recipe evaluates")] = None,
    num_eval_prompts: Annotated[Whole, option("held-out prompts, if the recipe evaluates on data of its own")] = None,
    prompt_tokens: Annotated[Whole, option("tokens per prompt, for forecasts; default: as in the data")] = None,
    pass_rate: Annotated[
        list[float] | None, option("known share of right answers to one prompt; can be repeated")
    ] = None,
    gpu: Annotated[
        str | None, option("forecast for this GPU, such as H200, instead of this machine's hardware")
    ] = None,
    history: Annotated[bool, option("ask MLflow for the pace of earlier runs of this model (takes seconds)")] = False,
    overrides: Annotated[list[str] | None, set_option("override one key of the configuration")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Show what a run would do and need, or why it is refused and what would work. Exit status 2 when it is refused."""
    given = {
        key: value
        for key, value in locals().items()
        if key in PlanInputs.__dataclass_fields__ and key != "rules" and value is not None
    }
    foreign = recipe is not None or rules not in (None, "grpo")
    own = {"--set": overrides, "--gpu": gpu, "--history": history, "--prompt-tokens": prompt_tokens}
    answer: dict[str, Any] = {"valid": False, "errors": [], "fixes": []}
    try:
        if unused := [option for option, value in own.items() if foreign and value]:
            raise ConfigError(
                f"{', '.join(unused)}: for this project's configurations only, not with --recipe or --rules"
            )
        if foreign:
            answer |= _foreign_plan(file, _rules(recipe, rules), given, pass_rate or [])
        else:
            answer |= own_plan(file, given, overrides, prompt_tokens, pass_rate or [], gpu, history)
    except PlanError as error:
        fixes = [dataclasses.asdict(fix) for fix in error.fixes]
        given = {key: value for key, value in dataclasses.asdict(error.inputs).items() if value is not None}
        answer |= {"errors": error.problems, "fixes": fixes, **given}
    except GrpoError as error:
        answer["errors"] = str(error).splitlines()
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        _show(answer)
    if not answer["valid"]:
        raise typer.Exit(2)


def own_plan(
    file: Path | None,
    given: Mapping[str, Any],
    overrides: list[str] | None,
    prompt_tokens: int | None = None,
    pass_rates: Sequence[float] = (),
    gpu: str | None = None,
    history: bool = False,
) -> dict[str, Any]:
    """Return the plan for a file of this project, or for values alone. Raises GrpoError if it is refused."""
    if ignored := given.keys() & {"per_device_eval_batch_size", "num_generations_eval", "num_eval_prompts"}:
        raise ConfigError(
            f"{', '.join(sorted(ignored))}: this project evaluates prompt by prompt, without such a setting"
        )
    if file is not None:
        check_no_code(file, NEWEST["trl"])
        if file.suffix in RECIPES:
            raise ConfigError(
                f"{file}: a configuration of this project is TOML; if this is another system's recipe, add --recipe "
                "trl (TRL, Open-R1) or --recipe swift (ms-swift); verl's are not read"
            )
    config, known = _configuration(file, given, overrides), given.get("num_prompts")
    if file is None:
        return _arithmetic(config, known, pass_rates, forecasts=history or (gpu, prompt_tokens) != (None, None))
    from flows.parameters.describe_plan import describe_plan  # imports polars

    return describe_plan(config, known, prompt_tokens, pass_rates, gpu, history)


def _arithmetic(config: RunConfig, known: int | None, pass_rates: Sequence[float], forecasts: bool) -> dict[str, Any]:
    """Return the plan for values alone, without a model to forecast anything of. Raises ConfigError if it is asked for
    `forecasts`."""
    if known is None:
        raise ConfigError("the number of prompts is not known; give it by --num-prompts, or give a configuration")
    if forecasts:
        raise ConfigError("--gpu, --history, --prompt-tokens: forecasts are about a model, so name a configuration")
    found = _plain(plan_inputs(config, known))
    return {**found, "forecasts": _useful(pass_rates, found["num_generations"]), "sources": {}}


def _foreign_plan(file: Path | None, rules: Rules, given: Mapping[str, Any], pass_rates: list[float]) -> dict[str, Any]:
    """Return the plan for another system's recipe, without the figures that depend on this project's loop."""
    recipe = read_recipe(file, rules) if file else Recipe(rules, {})
    rows: list[int | None] = [None]
    if "num_prompts" not in given and recipe.datasets:
        from tasks.data.sources import Source, count_prompts  # imports polars

        paths = [name.partition("#")[0] for name in recipe.datasets]
        found = [Source("dataset", path, recipe.split) for path in paths]
        rows = [count_prompts(it) if Path(it.data).exists() else None for it in found]
    assumes_one = not recipe.processes and "num_processes" not in given
    try:
        if recipe.algorithm == "megatron":
            answer = _megatron(recipe, rows, given)
        else:
            answer = _plain(recipe_inputs(recipe, rows, given))
    except PlanError as error:
        raise PlanError(error.inputs, [*error.problems, *[ONE_PROCESS] * assumes_one], error.fixes) from None
    answer["forecasts"] = _useful(pass_rates, answer["num_generations"])
    del answer["evaluations"], answer["sources"], answer["max_tokens_per_pass"]
    answer["notes"] += recipe.notes
    if assumes_one:
        answer["notes"].insert(0, ONE_PROCESS)
    return answer


def _plain(inputs: PlanInputs) -> dict[str, Any]:
    figures = make_plan(inputs)
    return {"valid": True, "rules": inputs.rules, "notes": notes(inputs, figures), **dataclasses.asdict(figures)}


def _megatron(recipe: Recipe, rows: list[int | None], given: Mapping[str, Any]) -> dict[str, Any]:
    inputs = megatron_inputs(recipe, rows, given)
    figures = megatron_plan(inputs)
    found = megatron_notes(inputs, figures)
    return {"valid": True, "rules": inputs.rules, "notes": found, **dataclasses.asdict(figures)}


def _rules(recipe: System | None, rules: Rules | None) -> Rules:
    """Return the given batch rules, which must belong to the recipe's system; by default its newest."""
    newest = NEWEST[recipe or "trl"]
    if rules is None:
        return newest
    if recipe and not rules.startswith(recipe):
        raise RecipeError(f"--rules {rules} does not go with --recipe {recipe}")
    return rules


def _useful(pass_rates: Sequence[float], num_generations: int) -> dict[str, Any]:
    return {"useful_groups": useful_groups(pass_rates, num_generations)} if pass_rates else {}


def _configuration(file: Path | None, given: Mapping[str, Any], overrides: list[str] | None) -> RunConfig:
    """Read the configuration, and put the options' values into the sections that declare them."""
    sections = {"rollout": RolloutConfig.model_fields, "train": TrainConfig.model_fields}
    placed = [(s, key) for s, fields in sections.items() for key in given if key in fields]
    if file is not None:
        return load_config(file, [*(overrides or []), *(f"{s}.{key}={given[key]}" for s, key in placed)])
    if overrides:
        raise ConfigError("--set overrides keys of a configuration, but no file is given: name one")
    values = NO_FILE | {section: {key: given[key] for s, key in placed if s == section} for section in sections}
    return parse_config(values)


def _show(answer: Mapping[str, Any]) -> None:
    terminal = Terminal()
    for error in answer["errors"]:
        print_refusal(error)
    if not answer["valid"]:
        if answer["fixes"]:
            terminal.print(_fixes_table(answer["fixes"]))
        return
    figures = {field.name: answer[field.name] for field in dataclasses.fields(Plan) if field.name in answer}
    title = f"plan (batch rules: {answer['rules']})"
    terminal.print(table_of(("quantity", "value"), plan_rows(figures), title))
    if sources := [*source_table(answer.get("sources", {}))]:
        terminal.print(table_of(sources[0], sources[1:]))
    for note in answer["notes"]:
        terminal.print(note, style="yellow")
    if answer["forecasts"]:
        head = ("forecast", "value", Column("how", overflow="fold"))  # keys are long
        terminal.print(table_of(head, forecast_rows(answer["forecasts"])))


def _fixes_table(fixes: list[dict[str, Any]]) -> Table:
    table = Table("what works, nearest first", "batch", "")
    for fix in fixes:
        changes = [f"remove {key}" if value is None else f"{key} = {value}" for key, value in fix["changes"].items()]
        kept = "same batch" if fix["keeps_generation_batch"] else ""
        table.add_row(", ".join(changes), f"{fix['generation_batch_size']:,}", kept)
    return table
