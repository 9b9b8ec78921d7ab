"""Asks a model version held-out prompts as MLflow will, and compares with what the evaluation found: `python -m
tasks.registry.answers RUN VERSION OUTPUT`, where VERSION is the version's folder. Writes an `Agreement` as JSON.

The version answers greedily. Its answers are compared with the evaluation's own if these are greedy and each to one
prompt, and otherwise with the trained policy's greedy answers by the engine `transformers`.
"""

from __future__ import annotations

import json
import sys
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from grpo_core import run_files
from grpo_core.config.evaluation import HELD_OUT
from grpo_core.config.files import load_config
from grpo_core.config.run import RunConfig
from grpo_core.data.chat import decode_completions, is_conversation, text_of, without_gaps
from grpo_core.data.images import parts
from grpo_core.model.images import keys, on_device, showing
from grpo_core.model.loading import load_model
from grpo_core.model.precision import with_precision_of
from grpo_core.rollout.loading import PromptSets, read_prompts
from grpo_core.rollout.requests import evaluation_request, own_limit
from grpo_core.rollout.transformers_engine import TransformersEngine
from grpo_core.rollout.types import Sampling
from grpo_core.system.libraries import quiet_libraries
from grpo_core.system.processes import run_and_leave
from grpo_core.system.tables import read_parquet
from tasks.registry.agreement import EXACT, ROUNDED, Agreement, Asked, Steps, compare, with_reward_change
from tasks.stages.files import write_text

SECONDS = 20.0  # after which no further prompt is asked


def main() -> None:
    quiet_libraries()
    run, version, output = map(Path, sys.argv[1:])
    config = load_config(run / run_files.CONFIG)
    files = {HELD_OUT: run_files.prompts(run, config.evaluation_files[HELD_OUT])}
    sources = read_prompts(config, files)
    try:
        found, others = compare_by_mlflow(config, run, version, sources)
        write_text(output, json.dumps(asdict(found)))  # before rewards, which may hang or end this process
        write_text(output, json.dumps(asdict(with_reward_change(found, others, run))))
    finally:
        if sources.setting:
            sources.setting.environments.close()


def compare_by_mlflow(
    config: RunConfig, run: Path, version: Path, sources: PromptSets
) -> tuple[Agreement, list[Asked]]:
    """Ask the version up to `registry.served_prompts` held-out prompts, for at most SECONDS; see `compare`."""
    return compare(_ask(Trained(config, run, sources), version))


def _ask(trained: Trained, version: Path) -> Iterator[Asked]:
    from mlflow import pyfunc

    config, rows, model = trained.config, trained.sources.sets[HELD_OUT].rows, pyfunc.load_model(str(version))
    samples = read_parquet(trained.run / run_files.EVALUATION / run_files.SAMPLES)
    evaluated = samples.filter(set=HELD_OUT, sample=0).sort("row")["trained/completion"]
    same_way = config.evaluation.temperature == 0 and not config.environment.is_used
    end = time.monotonic() + SECONDS
    for row in range(min(len(rows), config.registry.served_prompts)):
        if row and time.monotonic() > end:
            break
        prompt, limit = rows[row]["prompt"], own_limit(config, rows[row]) or config.evaluation_length
        params = {"temperature": 0.0, "max_new_tokens": min(limit, config.evaluation_length)}
        given = {"messages": _asked(prompt, trained.images(row))} if is_conversation(prompt) else prompt
        answered: Any = model.predict(given, params)
        wanted = evaluated[row] if same_way else trained.text(trained.answer(row), row)
        yield Asked(row, answered[0], wanted, partial(trained.steps, row))


def _asked(prompt: Sequence[Mapping[str, Any]], images: Sequence[bytes]) -> list[dict[str, Any]]:
    """A prompt's messages as a client sends them, with its images in data: URLs."""
    messages, left = without_gaps(prompt), iter(images)

    def sent(part: dict[str, str]) -> dict[str, Any]:
        if part["type"] != "image":
            return part
        return {"type": "image_url", "image_url": {"url": f"data:;base64,{b64encode(next(left)).decode()}"}}

    return [{**it, "content": [*map(sent, parts(it["content"]))]} for it in messages] if images else messages


@dataclass(frozen=True)
class Trained:
    """The trained policy; its model is loaded when it is asked."""

    config: RunConfig
    run: Path
    sources: PromptSets

    def images(self, row: int) -> list[bytes]:
        """The image files of a held-out prompt."""
        prompts = self.sources.sets[HELD_OUT]
        return prompts.images.read(prompts.rows[row]["images"]) if prompts.images else []

    @cached_property
    def engine(self) -> TransformersEngine:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        precision = with_precision_of(self.config, device).train.mixed_precision
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        folder = self.run / run_files.TRAINING / run_files.MODEL
        model = load_model(folder, dtype=dtype, device=device, images=self.sources.images)
        return TransformersEngine(model, self.sources.tokenizer)

    def answer(self, row: int) -> list[int]:
        """The tokens of a greedy answer."""
        request = evaluation_request(self.config, self.sources.sets[HELD_OUT], row)
        sampling = Sampling(self.config.evaluation_length, stop=tuple(self.config.rollout.stop))
        [(_, [completion])] = [one for finished in self.engine.generate([request], sampling) for one in finished]
        return completion.ids

    def text(self, ids: list[int], row: int) -> str:
        prompts, stop = self.sources.sets[HELD_OUT], self.config.rollout.stop
        [found] = decode_completions([prompts.rows[row]], [prompts.ids[row]], [ids], self.sources.tokenizer, stop)
        return text_of(found)

    @torch.inference_mode()
    def steps(self, row: int) -> Steps:
        """A greedy answer, token by token."""
        ids, prompt, model = self.answer(row), self.sources.sets[HELD_OUT].ids[row], self.engine.model
        given, shown = on_device(model, torch.tensor([[*prompt, *ids]]))
        with showing(model, shown):
            logits = model(input_ids=given, use_cache=False, **keys(model, shown)).logits[0, len(prompt) - 1 : -1]
        highest, second = logits.topk(2).values.float().unbind(-1)
        texts = [self.text(ids[:count], row) for count in range(1, len(ids) + 1)]
        exact = model.dtype == torch.float32 and model.device.type == "cpu"
        ties = highest - second < (EXACT if exact else ROUNDED)
        return [*zip(texts, ties.tolist(), strict=True)]


if __name__ == "__main__":
    run_and_leave(main)
