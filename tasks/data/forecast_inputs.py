"""What a plan forecasts from: a run's validated data or, before these exist, its first prompts; and its last training.
Does not import transformers, which takes seconds, unless prompts have images."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from tokenizers import Tokenizer

from grpo_core import run_files
from grpo_core.config.run import RunConfig
from grpo_core.data import own_code
from grpo_core.data.images import MARK
from grpo_core.data.processor import load_processor, takes_images
from grpo_core.errors import ConfigError
from grpo_core.planning.ahead_forecast import EarlierSampling, SampledBatch
from grpo_core.planning.pace import EnvironmentPace, ValidatedCosts
from grpo_core.planning.shapes import ForecastError, PromptLengths, config_file
from grpo_core.planning.warm_start import Sizes
from grpo_core.system.tables import read_parquet
from tasks.data.completions import recorded_batches
from tasks.data.images.columns import sources
from tasks.data.images.reading import count_tokens
from tasks.data.path_or_hub import data_set
from tasks.data.sources import SourceError, folder_of, load_head, training_sources
from tasks.stages.run_directory import read_config
from tasks.stages.table import TRAIN, VALIDATE

FIRST = 200  # prompts
READ = 64  # the last generation batches
HOW_TO = "train some updates with rollout.max_staleness = 0 on vLLM servers, under this name, and plan again"


@dataclass(frozen=True)
class Validated:
    """Sizes of the validated data, and what they cost in time."""

    num_prompts: list[int]  # training prompts per source
    mean_tokens: float  # per prompt
    longest: int
    costs: ValidatedCosts
    prompts: Path  # training prompts
    longest_shown: int  # what teacher.template makes of one; 0 without a template
    has_images: bool


def validated(folder: Path, receipt: Mapping[str, Any]) -> Validated:
    """Read the output of the stage validate in `folder`."""
    lengths, parts = receipt["lengths"]["train"], receipt["parts"]
    counts = [part["num_prompts"] for name, part in parts.items() if data_set(name) == "train"]
    rewards = receipt.get("rehearsal", {}).get("rewards", {})
    seconds = sum(reward["seconds_per_completion"] for reward in rewards.values())
    environment = _environment_pace(receipt.get("rehearsal", {}).get("environments", {}))
    path = (folder / "train.parquet").resolve()
    costs = ValidatedCosts(receipt["num_prompts"]["eval"], seconds, environment)
    return Validated(
        counts, lengths["mean"], lengths["max"], costs, path, receipt.get("longest_shown", 0), "images" in receipt
    )


def _environment_pace(rehearsed: Mapping[str, Any]) -> EnvironmentPace | None:
    """Mean pace of the environments; None if there are none."""
    if not rehearsed:
        return None
    found = []
    for each in rehearsed.values():
        frame, tools = (each["reset"], each["get_reward"]), each["tools"].values()
        found.append(
            (
                sum(part["seconds"] for part in frame),
                sum(part["tokens"] for part in frame),
                max((tool["seconds"] for tool in tools), default=0.0),
                max((tool["tokens"] for tool in tools), default=0),
            )
        )
    return EnvironmentPace(*(statistics.mean(values) for values in zip(*found, strict=True)))


def read_validated(run: Path) -> Validated | None:
    """Read the validated data of a run directory; None if there is none, or if an older version wrote it."""
    try:
        return validated(VALIDATE.path(run), VALIDATE.read_receipt(run))
    except KeyError:
        return None


def demonstrated_sizes(receipt: Mapping[str, Any]) -> Sizes | None:
    """Sizes of the demonstrations, from the receipt of the stage that wrote them; None if it is not done."""
    found = receipt.get(run_files.DEMONSTRATIONS)
    return found and Sizes(found["rows"], found["longest"], found["longest_completion"], found["mean"])


def first_lengths(config: RunConfig) -> PromptLengths | None:
    """Tokens of the first training prompts and their images, without a chat template. None if data or tokenizer are not
    files on this machine, or cannot be read, or if a user's function makes the prompts: a plan does not run it."""
    if own_code.named(config.data):
        return None
    try:
        file = config_file(config.model.name_or_path, config.model.revision).with_name("tokenizer.json")
        heads = [head.drop_nulls("prompt") for head in load_head(config.data, FIRST)]
        prompts = pl.concat(_prompt_texts(head["prompt"]) for head in heads)
        images = _image_tokens(config, heads)
    except (ForecastError, SourceError, ConfigError, pl.exceptions.PolarsError):
        return None
    try:
        encoded = Tokenizer.from_file(str(file)).encode_batch_fast(prompts.to_list())
    except Exception:  # tokenizers raises no other class
        return None
    lengths = [len(prompt.ids) + more for prompt, more in zip(encoded, images, strict=True)]
    if not any(lengths):
        return None
    less = "a chat template and tools" if config.environment.is_used else "a chat template"
    how = f"of the first {len(lengths)} prompts, without {less}; --prompt-tokens says better"
    return PromptLengths(sum(lengths) / len(lengths), max(lengths), how)


def _prompt_texts(prompts: pl.Series) -> pl.Series:
    if prompts.dtype == pl.String:
        return prompts
    return prompts.list.eval(pl.element().struct.field("content").str.replace_all(MARK, "")).list.join("\n")


def _image_tokens(config: RunConfig, heads: list[pl.DataFrame]) -> list[int]:
    """Tokens of the images of each of these rows, by the headers of their files."""
    found = []
    for source, head in zip(training_sources(config.data), heads, strict=True):
        images = sources(head.schema)
        shows = images is not None and head.select(images.list.len() > 0).to_series().any()
        if not shows or not takes_images(config.model):
            found += [0] * head.height
        else:
            found += count_tokens(head, images, load_processor(config.model), *folder_of(source))
    return found


def earlier_sampling(run: Path) -> EarlierSampling | str:
    """Return the generation batches of a run's last training, or why they are of no use. A batch gets the seconds of
    all updates that use it; batches of one update share its seconds evenly."""
    training = TRAIN.path(run)
    if not (training / run_files.METRICS).exists():
        return f"the run {run.name} has not been trained: {HOW_TO}"
    try:
        config = read_config(run)
        rows = [json.loads(line) for line in (training / run_files.METRICS).read_text().splitlines()]
        files = recorded_batches(training)
        batches = _batches(rows, files, config.rollout.num_generations)
    except (ConfigError, OSError, ValueError, KeyError, pl.exceptions.PolarsError) as error:
        return f"the last training of run {run.name} cannot be read ({error}): {HOW_TO}"
    if config.rollout.engine != "vllm-server" or config.rollout.max_staleness or not batches:
        return f"the last training of run {run.name} does not show how fast servers are: {HOW_TO}"
    urls = config.rollout.vllm_server_base_urls
    how = f"from the completions and seconds of {len(batches)} generation batches of run {run.name}"
    return EarlierSampling(batches, len(urls) or config.rollout.vllm_num_servers, config.train.num_processes, how)


def _batches(rows: list[dict[str, Any]], files: list[Path], group: int) -> list[SampledBatch]:
    """Collect the generation batches, without the first, during which a server warms up, if there are others."""
    metrics = {row["step"]: row for row in rows}
    sampled_for: defaultdict[int, list[pl.DataFrame]] = defaultdict(list)  # generation batches, by their first update
    for file in files[-READ:]:
        table = read_parquet(file, columns=["step", "prompt_tokens", "completion_tokens"])
        step = int(table["step"][-1])
        sampled_for[step].append(table.filter(pl.col("step") == step))  # without rows that a roll-back has undone
    found = []
    starts = sorted(step for step in sampled_for if step in metrics)
    for step, following in zip(starts, [*starts[1:], max(metrics) + 1], strict=True):
        generated, scored = metrics[step]["time/generate"], metrics[step]["time/score"]
        whole = sum(metrics[update]["step_time"] for update in range(step, following)) / len(sampled_for[step])
        for table in sampled_for[step]:
            lengths = table["completion_tokens"].to_list()
            found.append(
                SampledBatch(
                    lengths=[lengths[first : first + group] for first in range(0, len(lengths), group)],
                    prompt_tokens=sum(table["prompt_tokens"].to_list()) / len(lengths),
                    sample_seconds=generated,
                    train_seconds=whole - generated - scored,
                    other_seconds=scored,
                )
            )
    return found[1:] or found
