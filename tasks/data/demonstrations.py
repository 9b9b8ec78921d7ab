"""The demonstrations of a warm start: read, encoded as the policy would sample them, and refused where nothing could be
learnt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_core import run_files
from grpo_core.config.run import RunConfig
from grpo_core.data.chat import turns
from grpo_core.data.demonstrations import SCHEMA, read_demonstrations
from grpo_core.data.recording import KEY, vocabulary
from grpo_core.environments.demonstrations import FORMS, Demonstration, DemonstrationError, encode, read_messages
from grpo_core.environments.setting import end_texts
from grpo_core.environments.turns import TemplateError, TurnFormat
from grpo_core.rewards.composition import passed, without_range
from grpo_core.system.tables import read_parquet
from tasks.data.completions import recorded_batches
from tasks.data.lengths import embedding_rows, load_tokenizer_and_context
from tasks.data.rows import Rows, kept_on_disk
from tasks.data.sources import Source, SourceError, load_source
from tasks.stages.files import read_json
from tasks.stages.run_directory import read_former_config, run_folder

SHOWN = 10  # rows that a refusal names
BLANKS = dict.fromkeys(map(ord, " \t\n\r\u00a0\u200b"))  # left out of prompts that are compared
Tools = Callable[[Mapping[str, Any]], list[Mapping[str, Any]]]  # JSON schemas that the prompt of a row shows


def demonstration_source(config: RunConfig) -> Source:
    """Source of the demonstrations. Only for a warm start that is not from the probe."""
    keys = config.warm_start
    assert keys.source is not None
    return Source("warm_start.demonstrations", keys.source, keys.split, None, keys.revision)


def load_demonstrations(config: RunConfig) -> Rows:
    """Load the rows; of a run, its right completions. Raises SourceError if they cannot be read, or have neither form's
    columns."""
    source = demonstration_source(config)
    if run_files.is_run(source.data):
        if run_folder(config.name).resolve() == Path(source.data).resolve():
            raise SourceError(f"{source} is the folder of this run, whose training would replace it; change the name")
        if given := config.warm_start.model_dump(include={"split", "revision"}, exclude_defaults=True):
            keys = " and ".join(f"warm_start.{key}={value!r}" for key, value in given.items())
            raise SourceError(f"{source} is a run, which has neither splits nor revisions: remove {keys}")
        return _right_completions(source)
    path = Path(source.data).resolve()
    if (run := next(filter(run_files.is_run, map(str, path.parents)), "")) and (
        path.is_dir() or path.parent.name == run_files.COMPLETIONS
    ):
        raise SourceError(f"{source} is a part of a run: to begin from its right completions, name the run, {run}")
    rows = load_source(source)
    if "messages" not in rows.columns and not {"prompt", "completion"} <= {*rows.columns}:
        raise SourceError(f"{source} has the columns {', '.join(rows.columns)}: demonstrations need {FORMS}")
    return rows


def _right_completions(source: Source) -> Rows:
    """The right completions of a finished run's training, as the probe chooses them: those that pass in full by that
    run's accuracy reward, each prompt's different ones once, without those that the length limit cut."""
    run = Path(source.data)
    training, config = run / run_files.TRAINING, read_former_config(run)
    files, counted = recorded_batches(training), read_json(training / run_files.RESULT).get("counted")
    if not counted:
        raise SourceError(f"{source} has no finished training: first run: grpo run {run / run_files.CONFIG}")
    if len(files) != (sampled := counted["rollouts"]):
        raise SourceError(
            f"{source}: {training / run_files.COMPLETIONS} has {len(files)} files of {sampled} generation batches; "
            "put the others back, or name another run"
        )
    if unknown := without_range(config):
        raise SourceError(
            f"{source}: which completions are right is not known, since its accuracy reward {unknown[0]!r} has no "
            f"range; give it range = [lowest, highest] in {run / run_files.CONFIG}"
        )
    seen = set[tuple[int, bytes]]()
    return kept_on_disk(_right_of(file, config, seen, source) for file in files)


def _right_of(file: Path, config: RunConfig, seen: set[tuple[int, bytes]], source: Source) -> pl.DataFrame:
    """The right completions of a generation batch that are not `seen`, by row of the prompt and hash of the tokens."""
    rewards = [f"rewards/{reward.name}" for reward in config.rewards]
    needed = ["row", "prompt", "truncated", "prompt_ids", "completion_ids", *rewards]
    try:
        names = pq.read_schema(file).names
        if missing := [name for name in needed if name not in names]:
            raise SourceError(
                f"{source}: {file} lacks {', '.join(missing)}: it is of an older version, or of other rewards than "
                "config.toml has; name another run"
            )
        table = read_parquet(file, [*needed, *(name for name in ("source", "trained_tokens") if name in names)])
    except (OSError, pa.ArrowInvalid, pl.exceptions.PolarsError) as error:
        raise SourceError(f"{source}: {file} cannot be read: {error}; put it back, or name another run") from error
    given = table.select(pl.col(rewards).cast(pl.Float64).fill_null(float("nan"))).to_numpy()
    sources = table["source"].to_list() if "source" in names else [None] * table.height
    if changed := {*sources} - ({it.name for it in config.data.sources} or {None}):
        raise SourceError(
            f"{source}: {file} has completions of {'no source' if None in changed else f'a source {min(changed)!r}'}, "
            "unlike its config.toml, which has changed since that training; name another run"
        )
    found = table.filter(pl.Series(passed(given, config, sources) == 1) & ~table["truncated"])
    hashes = [hashlib.blake2b(ids.to_numpy().tobytes(), digest_size=16).digest() for ids in found["completion_ids"]]
    keys = [*zip(found["row"], hashes, strict=True)]
    is_new = [key not in seen and not seen.add(key) for key in keys]
    return found.filter(pl.Series(is_new, dtype=pl.Boolean)).drop("truncated", *rewards, "source", strict=False)


def write_demonstrations(config: RunConfig, tools: Tools, held_out: Mapping[str, Rows], path: Path) -> dict[str, Any]:
    """Write the token ids of all demonstrations and return their number and sizes in tokens. `held_out`: prompts by
    set, which a demonstration must not answer, unless data.checks.near_overlap allows it, or drops the row.

    Raises SourceError if a row cannot be learnt from; the message names the first of them, and the rules.
    """
    rows, source = load_demonstrations(config), demonstration_source(config)
    tokenizer, context = load_tokenizer_and_context(config.model)
    turn_format = TurnFormat(tokenizer, end_texts(config, tokenizer), config.data.chat_template_kwargs)
    known, overlap, stop = embedding_rows(config.model), config.data.checks.near_overlap, config.rollout.stop
    frames = (frame for rows in held_out.values() for frame in rows.slices() if overlap != "warn")
    shown = {_key(prompt) for frame in frames for prompt in frame["prompt"].to_list()}
    if is_run := run_files.is_run(source.data):
        _check_former(source, vocabulary(tokenizer), config)
    kind = "right completions" if is_run else "rows"
    problems, broken, dropped = list[str](), 0, 0
    with pq.ParquetWriter(path, SCHEMA) as file:
        for first, frame in rows.numbered():
            found = list[Demonstration]()
            for number, row in enumerate(frame.iter_rows(named=True), first):
                try:
                    made = _recorded(row, turn_format, stop) if is_run else encode(row, turn_format, tools(row), stop)
                    is_held_out = bool(shown) and _key(_asked(row)) in shown
                    if is_held_out and overlap == "drop":
                        dropped += 1
                        continue
                    problem = next(_problems(made, context, known, is_held_out), "")
                except (DemonstrationError, TemplateError) as error:
                    problem = str(error)
                if not problem:
                    found.append(made)
                    continue
                broken += 1
                place = f"row {row['row']} of its dataset/train.parquet" if is_run else f"row {number}"
                if len(problems) < SHOWN and (line := f"  {place}: {problem}") not in problems:
                    problems.append(line)
            file.write_table(pa.Table.from_pylist([vars(each) for each in found], SCHEMA))
    if broken:
        raise SourceError(
            f"{source}: {broken:,} of {rows.height:,} {kind} cannot be learnt from:\n" + "\n".join(problems)
        )
    written = read_demonstrations(path)
    if not len(written.rows):
        raise SourceError(f"{source} has no {kind}" + f" left: {dropped:,} were dropped" * bool(dropped))
    return {**written.figures, "dropped": dropped}


def _check_former(source: Source, ours: str, config: RunConfig) -> None:
    """Raises SourceError unless the token ids of the run's completions mean what they do to this tokenizer, `ours`, and
    the same texts end them."""
    run, model = Path(source.data), config.model.name_or_path
    former = read_former_config(run)
    theirs = former.model.name_or_path
    if former.rollout.stop != config.rollout.stop:
        raise SourceError(
            f"{source} has rollout.stop={former.rollout.stop!r}, and this run {config.rollout.stop!r}: completions "
            "would end elsewhere; set it to the same"
        )
    for file in recorded_batches(run / run_files.TRAINING):
        if json.loads((pq.read_schema(file).metadata or {}).get(KEY, b"{}")).get("vocabulary") != ours:
            raise SourceError(
                f"{source}: {file} has token ids of another vocabulary than that of model.name_or_path={model!r}, by "
                f"the model {theirs!r}; name a run whose model has the same tokenizer"
            )


def _recorded(row: Mapping[str, Any], turns: TurnFormat, stop: Sequence[str]) -> Demonstration:
    """A completion as the policy sampled it; of a conversation, with the policy's own tokens trained. Raises
    DemonstrationError if nothing ends it that ends a completion of this policy."""
    ids = row["completion_ids"]
    made = Demonstration(row["prompt_ids"], ids, row.get("trained_tokens") or [1] * len(ids))
    said = turns.tokenizer.decode([number for number, own in zip(ids, made.trained_tokens, strict=True) if own])
    if not said.endswith(turns.ends) and not any(text in said for text in stop):
        raise DemonstrationError(
            f"it ends with {said[-20:]!r}, and a completion of this model with {' or '.join(map(repr, turns.ends))}; "
            "name a run whose model has the same end tokens"
        )
    return made


def _problems(made: Demonstration, context: int | None, known: int, is_held_out: bool) -> Iterator[str]:
    ids = made.prompt_ids + made.completion_ids
    if not made.prompt_ids or not any(made.trained_tokens):
        yield "the tokenizer turns its prompt, or what the assistant says, into no tokens"
    if context is not None and len(ids) > context:
        yield f"it has {len(ids):,} tokens, and the model takes {context:,}; shorten it, or leave it out"
    if max(ids, default=0) >= known:
        yield f"it has the token {max(ids)}, and the model's embedding {known:,} rows; leave that token out"
    if is_held_out:
        yield (
            "its prompt is a held-out one, on which the run is evaluated; leave it out (data.checks.near_overlap = "
            "'drop' does that, 'warn' keeps it)"
        )


def _key(prompt: Any) -> str:
    """A prompt without case, white space and the system's message, by which it is compared; messages with their roles,
    and a text as the user's."""
    said = turns(prompt if isinstance(prompt, str) else read_messages(prompt))
    asked = [turn for turn in said if turn[0] not in ("system", "developer")] or said
    return "".join(f"{role or 'user'}:{text}" for role, text in asked).casefold().translate(BLANKS)


def _asked(row: Mapping[str, Any]) -> Any:
    """The prompt of a row that can be encoded: of messages, those before the first turn of the assistant."""
    given = row.get("messages")
    return [*takewhile(lambda message: message["role"] != "assistant", given)] if given else row["prompt"]
