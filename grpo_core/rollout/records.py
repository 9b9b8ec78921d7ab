"""Samples as columns of records, and generation batches read from the records of an earlier training."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from grpo_core.config.run import RunConfig
from grpo_core.data.order import Schedule
from grpo_core.data.recording import read_batch
from grpo_core.model.sequences import pad
from grpo_core.planning.plan import Plan
from grpo_core.rollout.batch_metrics import length_metrics
from grpo_core.rollout.collect import Sample, generation_batch
from grpo_core.rollout.types import Completion, GenerationBatch
from grpo_core.system.progress import phase

OPTIONAL = ("trained_tokens", "ages", "routed_experts")


def token_columns(
    samples: Sequence[Sample], *, with_routes: bool, taught: Mapping[str, torch.Tensor]
) -> dict[str, pa.Array]:
    """Columns that training on the samples needs beside texts and rewards. `sampling_logprobs`: the engine's, float32;
    `trained_tokens`: of conversations, 1 per token that the policy sampled, 0 per token of the environment;
    `routed_experts`: the engine's, token by token of prompt and completion, layer by layer. `taught`: a served
    teacher's log-probabilities, by their column."""
    completions = [sample.completion for sample in samples]
    found = {
        "row": pa.array([sample.row for sample in samples], pa.int64()),
        "prompt_ids": _lists([sample.prompt_ids for sample in samples], np.int32),
        "completion_ids": _lists([completion.ids for completion in completions], np.int32),
        "sampling_logprobs": _lists([completion.logprobs for completion in completions], np.float32),
    }
    if masks := [completion.mask for completion in completions if completion.mask is not None]:
        found["trained_tokens"] = _lists(masks, np.int8)  # of all, since all are conversations
    if with_routes:
        found["routed_experts"] = _lists([each.routes.ravel() for each in completions], np.int16)  # type: ignore
    for name, logprobs in taught.items():
        rows = zip(logprobs.tolist(), completions, strict=True)
        found[name] = _lists([row[: len(each.ids)] for row, each in rows], np.float32)
    return found


def _lists(rows: Sequence[Sequence[float]], kind: type[np.number]) -> pa.Array:
    """Make a column of lists, in a tenth of the time that `pa.array` takes. A batch may have more than 2^31 tokens."""
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    values = np.fromiter(itertools.chain.from_iterable(rows), kind, count=offsets[-1])
    return pa.LargeListArray.from_arrays(offsets, values)


def logged_columns(samples: Sequence[Sample]) -> dict[str, list[str | None]]:
    """Columns that rewards have added by `log_extra`: `logged/REWARD/COLUMN`, null where that reward said nothing."""
    names = sorted({name for sample in samples for name in sample.logged.columns})
    return {f"logged/{name}": [sample.logged.columns.get(name) for sample in samples] for name in names}


def conversation_columns(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Columns of records for conversations; empty without tools and environment. `opening`: what the environment's
    `reset` added to the prompt; `conversation`: the messages after that, as JSON; `environment_failure` and
    `verifier_error`: "" if there was none."""
    held = [sample.said for sample in samples if sample.said]
    if not held:
        return {}
    return {
        "opening": [said.opening for said in held],
        "conversation": [json.dumps(said.messages, ensure_ascii=False) for said in held],
        "turns": [said.turns for said in held],
        "tool_calls": [said.calls.total() for said in held],
        "failed_tool_calls": [said.failed_calls.total() for said in held],
        "environment_seconds": [round(said.seconds, 4) for said in held],
        "environment_failure": [said.failure for said in held],
        "verifier_error": [said.verifier_error for said in held],
    }


@phase("reading the recording")
def replay(index: int, config: RunConfig, plan: Plan) -> tuple[GenerationBatch, list[Sample]]:
    """Return generation batch `index` as recorded, and its samples in the same order. Rewards are those of the
    recording; they are weighted and compared as `config` says.

    The same on every process, each of which reads the whole.
    """
    table = read_batch(config.rollout, index)
    names = ["row", "prompt_ids", "completion", "completion_ids", "sampling_logprobs", "truncated"]
    optional = (*OPTIONAL, config.teacher.recorded_as)
    kept = [table[name].to_pylist() if name in table.column_names else None for name in optional]
    masks, ages, routes, taught = (found or [None] * len(table) for found in kept)
    scores = np.array([table[f"rewards/{it.name}"].to_numpy() for it in config.rewards], dtype=np.float64)  # null → NaN
    lengths = (len(ids) + len(more) for ids, more in zip(*(table[name] for name in names[1:4:2]), strict=True))
    routes = [it and np.array(it, np.int16).reshape(n, -1) for it, n in zip(routes, lengths, strict=True)]
    said = (table[name].to_pylist() for name in names)
    rows = zip(*said, masks, ages, routes, taught, scores.T.tolist(), strict=True)
    samples = [
        Sample(row, prompt, Completion(ids, logprobs, cut, mask, age, routes=experts), text, rewards, taught=told)
        for row, prompt, text, ids, logprobs, cut, mask, age, experts, told, rewards in rows
    ]
    seconds = {"time/generate": 0.0, "time/score": 0.0}
    return generation_batch(index, Schedule(plan, config.seed), config, samples, samples, seconds), samples


def demonstrated(index: int, rows: Sequence[Mapping[str, Any]], schedule: Schedule) -> GenerationBatch:
    """Return generation batch `index` of a warm start: each demonstration as a completion with the advantage 1. The
    same on every process."""
    places = schedule.prompts(index)
    completions = [
        Completion(row["completion_ids"], [0.0] * len(row["completion_ids"]), False, row["trained_tokens"])
        for row in (rows[place] for place in places)
    ]
    return GenerationBatch(
        index=index,
        scheduled_rows=places,
        prompt_ids=[rows[place]["prompt_ids"] for place in places],
        completion_ids=pad([each.ids for each in completions], torch.int64),
        completion_mask=pad([each.mask or [] for each in completions], torch.float32),
        completion_lengths=torch.tensor([len(each.ids) for each in completions]),
        truncated=torch.zeros(len(places), dtype=torch.bool),
        sampling_logprobs=pad([each.logprobs for each in completions], torch.float32),
        advantages=torch.ones(len(places)),
        sampled_completions=0,
        sampled_tokens=0,
        sampled_rows=torch.tensor(places),
        passed=torch.full((len(places),), torch.nan, dtype=torch.float64),
        metrics=length_metrics(completions),
    )
