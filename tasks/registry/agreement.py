"""Asks a model version held-out prompts as MLflow will, and compares with what the evaluation found: `python -m
tasks.registry.agreement RUN VERSION OUTPUT`, where VERSION is the version's folder. Writes an `Agreement` as JSON.

The version answers greedily. Its answers are compared with the evaluation's own if these are greedy and each to one
prompt, and otherwise with the trained policy's greedy answers by the engine `transformers`.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from grpo_core import run_files
from grpo_core.config.evaluation import HELD_OUT
from grpo_core.config.files import load_config
from grpo_core.config.run import RunConfig
from grpo_core.data.chat import decode_completions, is_conversation, text_of, without_gaps
from grpo_core.model.loading import load_model
from grpo_core.model.precision import with_precision_of
from grpo_core.rollout.loading import PromptSets, read_prompts
from grpo_core.rollout.requests import evaluation_request, own_limit
from grpo_core.rollout.transformers_engine import TransformersEngine
from grpo_core.rollout.types import Sampling
from grpo_core.system.libraries import quiet_libraries
from grpo_core.system.processes import run_and_leave
from grpo_core.system.tables import read_parquet

SECONDS = 20.0  # after which no further prompt is asked
SHOWN = 5  # answers that differ
# Difference of the two highest logits within which rounding may choose either token: in float32 on a CPU, and in
# bfloat16 or by a GPU's kernels.
EXACT, ROUNDED = 1e-3, 0.25


@dataclass(frozen=True)
class Agreement:
    """Number of compared prompts, of equal answers, and of ties: answers whose first differing token is one of two that
    are equally likely, except for rounding. `differing`: the first of the others, with both answers."""

    compared: int
    equal: int
    ties: int
    differing: list[dict[str, Any]]


def main() -> None:
    quiet_libraries()
    run, version, output = map(Path, sys.argv[1:])
    config = load_config(run / run_files.CONFIG)
    files = {HELD_OUT: run_files.prompts(run, config.evaluation_files[HELD_OUT])}
    sources = read_prompts(config, files)
    try:
        output.write_text(json.dumps(asdict(compare(config, run, version, sources))))
    finally:
        if sources.setting:
            sources.setting.environments.close()


def compare(config: RunConfig, run: Path, version: Path, sources: PromptSets) -> Agreement:
    """Ask the version up to `registry.served_prompts` held-out prompts, for at most SECONDS."""
    from mlflow import pyfunc

    model, trained, rows = pyfunc.load_model(str(version)), Trained(config, run, sources), sources.sets[HELD_OUT].rows
    evaluated = read_parquet(run / run_files.EVALUATION / run_files.SAMPLES).filter(set=HELD_OUT, sample=0).sort("row")
    same_way = config.evaluation.temperature == 0 and not config.environment.is_used
    expected = evaluated["trained/completion"].to_list() if same_way else None
    compared = equal = ties = 0
    differing: list[dict[str, Any]] = []
    end = time.monotonic() + SECONDS
    for row in range(min(len(rows), config.registry.served_prompts)):
        if compared and time.monotonic() > end:
            break
        limit = own_limit(config, rows[row])
        params = {
            "temperature": 0.0,
            "max_new_tokens": min(limit or config.evaluation_length, config.evaluation_length),
        }
        answers: Any = model.predict(_as_input(rows[row]["prompt"]), params)
        served = answers[0]
        wanted = expected[row] if expected else trained.text(trained.answer(row), row)
        compared += 1
        if served == wanted:
            equal += 1
        elif trained.is_tie(row, served, wanted):
            ties += 1
        else:
            differing.append({"row": row, "version": served, "evaluation": wanted})
    return Agreement(compared, equal, ties, differing[:SHOWN])


def _as_input(prompt: Any) -> Any:
    return {"messages": without_gaps(prompt)} if is_conversation(prompt) else prompt


@dataclass(frozen=True)
class Trained:
    """The trained policy; its model is loaded when it is asked."""

    config: RunConfig
    run: Path
    sources: PromptSets

    @cached_property
    def engine(self) -> TransformersEngine:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        precision = with_precision_of(self.config, device).train.mixed_precision
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        model = load_model(self.run / run_files.TRAINING / run_files.MODEL, dtype=dtype, device=device)
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
    def is_tie(self, row: int, *answers: str) -> bool:
        """True if two tokens are equally likely, except for rounding, at the first token of the greedy answer at which
        one of these texts differs from it, or at one just before that shows no text, such as an end token."""
        ids, prompt = self.answer(row), self.sources.sets[HELD_OUT].ids[row]
        texts = [self.text(ids[:count], row) for count in range(len(ids) + 1)]
        [other, *_] = [text for text in answers if text != texts[-1]]
        first = next((n for n in range(len(ids)) if not other.startswith(texts[n + 1])), len(ids) - 1)
        begin = texts.index(texts[first])
        model = self.engine.model
        given = torch.tensor([[*prompt, *ids[:first]]], device=model.device)
        logits = model(input_ids=given, use_cache=False).logits[0, len(prompt) + begin - 1 :].float()
        highest, second = logits.topk(2).values.unbind(-1)
        exact = model.dtype == torch.float32 and model.device.type == "cpu"
        return bool((highest - second < (EXACT if exact else ROUNDED)).any())


if __name__ == "__main__":
    run_and_leave(main)
