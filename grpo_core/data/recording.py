"""Completions that a training sampled, as files that another can train on: one Parquet file per generation batch, one
row per completion, groups in sequence."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grpo_core import run_files
from grpo_core.config.rollout import RolloutConfig
from grpo_core.config.run import RunConfig
from grpo_core.data.images import in_words
from grpo_core.errors import ConfigError
from grpo_core.planning.plan import Plan

KEY = b"grpo"  # of a file's metadata
FILE = "rollout-{:06d}.parquet"
DRAWING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # what the log-probabilities are of
WHOLE = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}  # earlier, log-probabilities were over the whole vocabulary anyway
FACTS = {"num_generations", "generation_batch_size", "max_completion_length", "vocabulary", *DRAWING}
NEEDED = {"step", "row", "prompt", "prompt_ids", "completion_ids", "sampling_logprobs", "truncated", "completion"}


def folder_of(rollout: RolloutConfig) -> Path:
    """The folder of the files that `rollout.recording` names, whether they are there or not: of the finished training
    in that run directory, otherwise of the unfinished one."""
    run = Path(rollout.recording or "")
    finished = run / run_files.TRAINING / run_files.COMPLETIONS
    unfinished = run / run_files.unfinished(run_files.TRAINING) / run_files.COMPLETIONS
    return unfinished if unfinished.is_dir() and not finished.is_dir() else finished


def facts(config: RunConfig, plan: Plan, tokenizer: Any) -> dict[str, Any]:
    """Facts that a training on a file needs and its rows do not hold; they go into the file's metadata."""
    return {
        "num_generations": plan.num_generations,
        "generation_batch_size": plan.generation_batch_size,
        "max_completion_length": config.rollout.max_completion_length,
        **{name: getattr(config.rollout, name) for name in DRAWING},
        "vocabulary": vocabulary(tokenizer),
    }


def vocabulary(tokenizer: Any) -> str:
    """Hash of the tokenizer's vocabulary, which gives token ids their meaning."""
    return hashlib.blake2b(json.dumps(tokenizer.get_vocab(), sort_keys=True).encode(), digest_size=16).hexdigest()


def write_batch(table: pa.Table, known: Mapping[str, Any], path: Path) -> None:
    """Write the rows of a generation batch, with these facts."""
    # A dictionary of numbers that are nearly all different makes them larger.
    repeated = [
        f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name
        for field in table.schema
        if "_logprobs" not in field.name
    ]
    table = table.replace_schema_metadata({KEY: json.dumps(known)})
    pq.write_table(table, path, use_dictionary=repeated)


def read_batch(rollout: RolloutConfig, index: int) -> pa.Table:
    """The rows of generation batch `index`: those sampled last, if it was sampled again after a roll-back."""
    table = pq.read_table(folder_of(rollout) / FILE.format(index))
    return table.filter(pc.field("step") == pc.max(table["step"]))


def check_recording(config: RunConfig, plan: Plan, run: Path) -> None:
    """Raises ConfigError unless the recording has what the plan of the run in this directory takes."""
    recording = f"rollout.recording={config.rollout.recording!r}"
    if Path(config.rollout.recording or "").resolve() == run.resolve():
        raise ConfigError(
            f"{recording} is the directory of this run, whose training would overwrite it; change the name"
        )
    folder = folder_of(config.rollout)
    files = [folder / FILE.format(index) for index in range(plan.rollouts)]
    missing = next((index for index, file in enumerate(files) if not file.is_file()), plan.rollouts)
    if not missing:
        raise ConfigError(f"{recording} has no {folder / FILE.format(0)}: name the directory of a run that has trained")
    if missing < plan.rollouts:
        max_steps = max(step for step in range(plan.max_steps) if plan.counts(step)["rollouts"] <= missing)
        raise ConfigError(
            f"{recording} has {missing} generation batches, and the plan takes {plan.rollouts}: "
            f"set train.max_steps to {max_steps} or less"
        )
    for file in files:
        _check_file(file, config, plan)


def _check_file(file: Path, config: RunConfig, plan: Plan) -> None:
    """Raises ConfigError unless the file has what the plan takes. Reads only its footer."""
    try:
        schema = pq.read_schema(file)
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError(f"{file} cannot be read: {error}; record again") from None
    known = WHOLE | json.loads((schema.metadata or {}).get(KEY, b"{}"))
    if not (known.keys() >= FACTS and {*schema.names} >= NEEDED):
        raise ConfigError(f"{file} lacks what a training on it needs: an older version has written it; record again")
    asked = {
        "rollout.num_generations": (plan.num_generations, known["num_generations"]),
        "completions per generation batch": (plan.generation_batch_size, known["generation_batch_size"]),
        **{f"rollout.{name}": (getattr(config.rollout, name), known[name]) for name in DRAWING},
    }
    for name, (here, there) in asked.items():
        if here != there:
            raise ConfigError(f"{file}: {name} is {there:g} in the recording, and {here:g} here; it has to be the same")
    if (longest := config.rollout.max_completion_length) < known["max_completion_length"]:
        raise ConfigError(
            f"{file} has completions of up to {known['max_completion_length']} tokens; "
            f"rollout.max_completion_length={longest} has to be at least that"
        )
    if config.algorithm.routing_replay and "routed_experts" not in schema.names:
        raise ConfigError(
            f"{file} does not say which experts the engine took: set algorithm.routing_replay to false, or record it "
            "again with true"
        )
    scored = [name.removeprefix("rewards/") for name in schema.names if name.startswith("rewards/")]
    if unknown := [reward.name for reward in config.rewards if reward.name not in scored]:
        raise ConfigError(
            f"{file} has no values of the reward {unknown[0]!r}, only of {', '.join(scored)}: no reward is called in a "
            "training on a recording; remove it, or record again with it (its weight may be 0)"
        )


def check_tokens(config: RunConfig, plan: Plan, tokenizer: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raises ConfigError unless the recording has this tokenizer's token ids and the prompts of these rows."""
    ours = vocabulary(tokenizer)
    for index in range(plan.rollouts):
        file = folder_of(config.rollout) / FILE.format(index)
        if json.loads(pq.read_schema(file).metadata[KEY])["vocabulary"] != ours:
            raise ConfigError(
                f"{file} has token ids of another vocabulary than that of model.name_or_path="
                f"{config.model.name_or_path!r}; take a model with the tokenizer that it was recorded with"
            )
        table = pq.read_table(file, columns=["row", "prompt"])
        origins = ", ".join(f"{key}.train={origin.train!r}" for key, origin in config.data.origins.items())
        for row, prompt in zip(*(table[name].to_pylist() for name in ("row", "prompt")), strict=True):
            if row >= len(rows) or rows[row]["prompt"] != prompt:
                raise ConfigError(
                    f"{file} has another prompt in row {row} than {origins}: "
                    f"{str(in_words(prompt))[:200]!r}; train on the data that it was recorded with"
                )
