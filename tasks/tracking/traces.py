"""Sends completions as MLflow traces: prompt, answer and rewards, with tags to filter by.

A trace's id is derived from its run and content, so sending it again changes nothing. The trainer is not involved:
rollouts are read from completions/, evaluated samples from samples.parquet.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from mlflow.entities import (
    Assessment,
    AssessmentSource,
    Expectation,
    Feedback,
    Span,
    SpanType,
    TraceInfo,
    TraceLocation,
    TraceState,
)
from mlflow.tracing.client import TracingClient
from mlflow.tracing.constant import SpanAttributeKey, TraceMetadataKey, TraceTagKey

from grpo_core import run_files
from grpo_core.config.run import RunConfig
from grpo_core.data.chat import turns
from grpo_core.data.images import MARK, ImageFiles, beside, in_words, open_image
from tasks.data.completions import read_figures, read_rows, recorded_batches
from tasks.rendering.pictures import thumbnail
from tasks.rendering.visible import shortened, visible
from tasks.stages.files import write_text
from tasks.stages.mlflow_address import first_cause, tracking_uri
from tasks.tracking.sending import CANCELLED_SECONDS, LAST_SECONDS

TRACED_FILE = "mlflow_traced"  # in a training's folder: write time of the newest generation batch that MLflow accepted
LONGEST_TEXT = 50_000  # characters of a message
LONGEST_PREVIEW = 1000  # characters of prompt and completion in the table of traces: PostgreSQL refuses more
LONGEST_TAG = 250
LINK = re.compile(r"\](?=[(:])")  # in a link, a picture and a definition of either (CommonMark 0.31, 4.7, 6.3, 6.4)
TRACES_PER_REQUEST = 25
SECONDS_BETWEEN_BATCHES = 2.0
SECONDS_AFTER_FAILURE = 60.0
SHARE = 0.01  # of the training's time, for which the thread may work
MOST_AT_END = 25  # generation batches sent after the training, which waits for it


@dataclass(frozen=True)
class Told:
    """One completion to be traced. `identity`: unique among all completions; `messages`: the turns after the prompt;
    `tokens`: of prompt (None: not recorded) and completion; `time`: in ms since 1970; `run_id`, `model_id`: MLflow's,
    "" for none; `others`: answers of other policies; `expected`: the right answer, if the data has it; `images`:
    addresses of the prompt's thumbnails."""

    name: str
    identity: Sequence[Any]
    prompt: Any
    messages: Sequence[Mapping[str, Any]]
    tokens: tuple[int | None, int]
    rewards: Mapping[str, float | None]
    tags: Mapping[str, Any]
    time: int
    run_id: str
    model_id: str = ""
    others: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    expected: str | None = None
    images: Sequence[str] = ()


@contextmanager
def tracing(folder: Path, tracked: Mapping[str, Any], config: RunConfig, log: Any) -> Iterator[None]:
    """While the body runs, send MLflow rollouts of generation batches in `folder`, from a thread that uses SHARE of the
    time; then, for a limited time, those of at most MOST_AT_END of the remaining batches. The next attempt, or
    register, sends what is left."""
    if not config.registry.traces_per_batch:
        yield
        return
    ended, given_up = threading.Event(), threading.Event()
    arguments = (folder, tracked, config, log, ended, given_up)
    thread = threading.Thread(target=_follow, args=arguments, name="MLflow traces", daemon=True)
    thread.start()
    seconds = CANCELLED_SECONDS
    try:
        yield
        seconds = LAST_SECONDS
    finally:
        ended.set()
        thread.join(seconds)
        given_up.set()


def _follow(
    folder: Path,
    tracked: Mapping[str, Any],
    config: RunConfig,
    log: Any,
    ended: threading.Event,
    given_up: threading.Event,
) -> None:
    pause, answers = SECONDS_BETWEEN_BATCHES, True
    waiting: list[tuple[int, Path]] = []
    while not given_up.is_set():
        ended.wait(pause)
        is_last, start = ended.is_set(), time.monotonic()
        try:
            if is_last or not waiting:
                waiting = _unsent(folder)
            for written, file in _spread(waiting) if is_last else waiting[:1]:
                if not given_up.is_set():
                    _send_batch(file, written, folder, tracked, config)
            waiting = waiting[1:]
            answers, pause = True, max(SECONDS_BETWEEN_BATCHES, (time.monotonic() - start) / SHARE)
        except Exception as error:  # failed traces must neither end a training nor keep its figures from MLflow
            if answers and not given_up.is_set():
                log.warning("MLflow does not accept rollouts as traces; trying again: %s", first_cause(error))
            answers, pause, waiting = False, SECONDS_AFTER_FAILURE, []  # its file may be gone
        if is_last:
            return


def send_rest_of_rollouts(tracked: Mapping[str, Any], folder: Path, config: RunConfig, log: Any) -> None:
    """Send rollouts of the generation batches after the newest that MLflow has accepted, at most MOST_AT_END batches.
    If MLflow does not accept them, log a warning."""
    waiting = _unsent(folder) if config.registry.traces_per_batch else []
    if not waiting:
        return
    some = _spread(waiting)
    log.info("MLflow has no rollouts of %d generation batches: sending those of %d", len(waiting), len(some))
    try:
        for written, file in some:
            _send_batch(file, written, folder, tracked, config)
    except Exception as error:  # a model version must not be lost because of its traces
        log.warning("MLflow does not accept rollouts as traces: %s", first_cause(error))


def _send_batch(file: Path, written: int, folder: Path, tracked: Mapping[str, Any], config: RunConfig) -> None:
    """Send rollouts of a generation batch; if it was sampled again, those of the update it was last sampled for."""
    figures = read_figures([file], config.rewards)
    newest = figures.filter(pl.col("step") == pl.col("step").max())
    chosen = newest[choose(newest["reward"].to_list(), newest["group"].to_list(), config.registry.traces_per_batch)]
    rows, milliseconds = read_rows([file], chosen), written // 1_000_000
    images = beside(run_files.prompts(folder.parent, "train"))
    told = [_rollout(row, config, tracked["run_id"], file.stem, milliseconds, images) for row in rows]
    send(told, tracked["experiment_id"])
    write_text(folder / TRACED_FILE, str(written))


def _spread(waiting: Sequence[tuple[int, Path]]) -> Sequence[tuple[int, Path]]:
    """Choose at most MOST_AT_END of these, evenly spread and including the last."""
    return waiting[:: -max(1, -(-len(waiting) // MOST_AT_END))][::-1]


def _unsent(folder: Path) -> list[tuple[int, Path]]:
    """(write time in ns, file) of each generation batch that MLflow has not accepted, the oldest first. A batch that is
    sampled again is written again."""
    try:
        newest = int((folder / TRACED_FILE).read_text())
    except (FileNotFoundError, ValueError):  # empty after a power loss; MLflow keeps one of two equal traces
        newest = 0
    found = [(file.stat().st_mtime_ns, file) for file in recorded_batches(folder)]
    return sorted((written, file) for written, file in found if written > newest)


def choose(rewards: Sequence[float], groups: Sequence[int], count: int) -> list[int]:
    """Choose `count` completions of a generation batch, from the reward and the group of each; returns their indices.
    In this order: the worst and the best of the group with the lowest mean reward, the same of the group with the
    highest, the worst of other groups evenly over their order, then others. An unscored completion (NaN) counts as the
    worst of its group, and is left out of the group's mean."""
    values = np.nan_to_num(np.array(rewards, dtype=float), nan=-np.inf)
    members: dict[int, list[int]] = {}
    for place in np.argsort(values, kind="stable"):
        members.setdefault(groups[place], []).append(int(place))
    scored = {group: [values[it] for it in of_group if values[it] > -np.inf] for group, of_group in members.items()}
    ranked = sorted(members, key=lambda group: (np.mean(scored[group] or -np.inf), group))
    ends, between = [*dict.fromkeys([ranked[0], ranked[-1]])], ranked[1:-1]
    step = max(1, len(between) // max(1, count - 2 * len(ends)))
    order = [
        *(place for group in ends for place in (members[group][0], members[group][-1])),
        *(members[group][0] for group in between[step // 2 :: step]),
        *range(len(groups)),
    ]
    return [*dict.fromkeys(order)][:count]


def thumbnails(row: Mapping[str, Any], images: ImageFiles | None) -> list[str]:
    """Thumbnails of the images in a recorded row's prompt."""
    return [thumbnail(open_image(data)) for data in images.read(row["images"])] if images and "images" in row else []


def _rollout(
    row: Mapping[str, Any], config: RunConfig, run_id: str, batch: str, time: int, images: ImageFiles | None
) -> Told:
    return Told(
        name=f"rollout, update {row['step']}",
        identity=[run_id, batch, row["step"], row["place"], row["completion"], row.get("conversation")],
        prompt=row["prompt"],
        messages=messages_of(row.get("conversation"), row["completion"]),
        tokens=(row["prompt_tokens"], row["completion_tokens"]),
        rewards={it.name: row[f"rewards/{it.name}"] for it in config.rewards},
        tags={
            "kind": "rollout",
            "run": config.name,
            "step": row["step"],
            "weights": f"after update {row['step'] - 1}" + _age(row),
            "batch": batch.removeprefix("rollout-").lstrip("0") or "0",
            "group": row["group"],
            "row": row["row"],
            "reward": _figure(row["reward"]),
            "advantage": _figure(row["advantage"]),
            "tokens": row["completion_tokens"],
            "truncated": str(row["truncated"]).lower(),
            **({"turns": row["turns"]} if "turns" in row else {}),
        },
        time=time,
        run_id=run_id,
        images=thumbnails(row, images),
    )


def _age(row: Mapping[str, Any]) -> str:
    """End of the name of a rollout's weights, if it was sampled ahead; else ""."""
    oldest = max(row.get("ages") or [0])
    return f", its oldest token {oldest} earlier" if oldest else ""


def messages_of(conversation: str | None, completion: str) -> list[dict[str, Any]]:
    return json.loads(conversation) if conversation else [{"role": "assistant", "content": completion}]


def _figure(value: float) -> str:
    return "none" if math.isnan(value) else f"{value:.4g}"


def send(told: Sequence[Told], experiment_id: str) -> None:
    """Send these as traces. Raises the client's errors; some traces may have been sent then."""
    client = TracingClient(tracking_uri())
    for first in range(0, len(told), TRACES_PER_REQUEST):
        some = told[first : first + TRACES_PER_REQUEST]
        for it in some:
            client.start_trace(_info(it, experiment_id))
        client.log_spans(experiment_id, [span for it in some for span in _spans(it)])


def _trace_number(it: Told) -> bytes:
    return hashlib.blake2b(json.dumps(it.identity, default=str).encode(), digest_size=16).digest()


def trace_id(it: Told) -> str:
    return f"tr-{_trace_number(it).hex()}"


def _info(it: Told, experiment_id: str) -> TraceInfo:
    prompt, completion = it.tokens
    usage = {"output_tokens": completion, "total_tokens": completion + (prompt or 0)}
    usage |= {} if prompt is None else {"input_tokens": prompt}
    metadata = {
        TraceMetadataKey.SOURCE_RUN: it.run_id,
        TraceMetadataKey.MODEL_ID: it.model_id,
        TraceMetadataKey.TOKEN_USAGE: json.dumps(usage),
    }
    asked = "\n".join(text for _, text in turns(in_words(it.prompt)))
    return TraceInfo(
        trace_id=trace_id(it),
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=it.time,
        state=TraceState.OK,
        request_preview=preview(asked),
        response_preview=preview(turns(it.messages)[-1][1] if it.messages else ""),
        trace_metadata={name: value for name, value in metadata.items() if value},
        tags={
            TraceTagKey.TRACE_NAME: it.name,
            **{name: visible(str(value))[:LONGEST_TAG] for name, value in it.tags.items()},
        },
        assessments=[*_assessments(it)],
    )


def preview(text: str) -> str:
    """Return the `shortened` text, never longer than LONGEST_PREVIEW, although escaping may lengthen it."""
    return shortened(text, LONGEST_PREVIEW - 50)[:LONGEST_PREVIEW]


def _assessments(it: Told) -> Iterator[Assessment]:
    """Yield one assessment per reward, named after it, even if the reward did not apply; and the right answer, if
    known."""
    for name, value in it.rewards.items():
        found = Feedback(
            name=name,
            value=None if value is None else float(value),
            error="the reward gave None" if value is None else None,
            source=AssessmentSource("CODE", f"rewards/{name}"),
        )
        yield _identified(it, found)
    if it.expected is not None:
        yield _identified(it, Expectation("answer", _text(it.expected), AssessmentSource("CODE", "data")))


def _identified(it: Told, assessment: Assessment) -> Assessment:
    """Give the assessment its trace and time, and an id by which MLflow recognises it when it is sent again."""
    name = f"{type(assessment).__name__} {assessment.name}"
    digest = hashlib.blake2b(_trace_number(it) + name.encode(), digest_size=16).hexdigest()
    assessment.assessment_id, assessment.trace_id = f"a-{digest}", trace_id(it)
    assessment.create_time_ms = assessment.last_update_time_ms = it.time
    return assessment


def _spans(it: Told) -> Iterator[Span]:
    """Yield a span for the whole; below it, one per turn of a conversation and per answer of another policy. None has a
    duration."""
    shown = iter(it.images)
    asked = [{"role": role or "user", "content": _content(text, shown)} for role, text in turns(it.prompt)]
    said = [{"role": role, "content": _text(text)} for role, text in turns(it.messages)]
    yield _span(it, 0, it.name, SpanType.CHAT_MODEL, {"messages": asked}, {"messages": said})
    below: list[tuple[str, str, Any]] = []
    if len(said) > 1:
        for message, whole in zip(said, it.messages, strict=True):
            is_policy = message["role"] == "assistant"
            name = "policy" if is_policy else visible(str(whole.get("name", message["role"])))
            below.append((name, SpanType.LLM if is_policy else SpanType.TOOL, message["content"]))
    for other, messages in it.others.items():
        answer = [{"role": role, "content": _text(text)} for role, text in turns(messages)]
        below.append((f"the {other} answered", SpanType.CHAT_MODEL, {"messages": answer}))
    for number, (name, kind, outputs) in enumerate(below, 1):
        yield _span(it, number, name, kind, None, outputs)


def _content(text: str, images: Iterator[str]) -> str | list[dict[str, Any]]:
    """The text; with images, content parts in OpenAI's form, which MLflow's page shows with the images."""
    first, *others = text.split(MARK)
    found: list[dict[str, Any]] = [{"type": "text", "text": _text(first)}] if first else []
    for other in others:
        address = next(images, "")
        image = {"type": "image_url", "image_url": {"url": address}} if address else {"type": "text", "text": "[image]"}
        found += [image, *([{"type": "text", "text": _text(other)}] if other else [])]
    return found if others else _text(text)


def _text(text: str) -> str:
    """Prepare the text for a page that renders Markdown: disable links, which hide their targets, and pictures, which
    the page would load."""
    return LINK.sub("]\\\\", shortened(text, LONGEST_TEXT))


def _span(it: Told, number: int, name: str, kind: str, inputs: Any, outputs: Any) -> Span:
    """Make span `number` of the trace; 0 is the root."""

    def identity(which: int) -> str:
        return base64.b64encode(
            hashlib.blake2b(_trace_number(it) + bytes([1]) + str(which).encode(), digest_size=8).digest()
        ).decode()

    values = {SpanAttributeKey.REQUEST_ID: trace_id(it), SpanAttributeKey.SPAN_TYPE: kind}
    values |= {SpanAttributeKey.OUTPUTS: outputs} | ({SpanAttributeKey.INPUTS: inputs} if inputs is not None else {})
    start = it.time * 1_000_000 + number  # keeps the spans in order
    return Span.from_dict(
        {
            "trace_id": base64.b64encode(_trace_number(it)).decode(),
            "span_id": identity(number),
            "parent_span_id": identity(0) if number else None,
            "name": shortened(name, LONGEST_TAG),
            "start_time_unix_nano": start,
            "end_time_unix_nano": start,
            "status": {"code": "STATUS_CODE_OK", "message": ""},
            "attributes": {key: json.dumps(value, ensure_ascii=False) for key, value in values.items()},
        }
    )
