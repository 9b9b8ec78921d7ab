"""Measure how often the base model solves each training prompt: the pass rates that a curriculum begins with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_core import run_files
from grpo_core.config.files import load_config
from grpo_core.data.curriculum import PassRates, no_rates, with_samples, write_rates
from grpo_core.data.demonstrations import SCHEMA, read_demonstrations
from grpo_core.rewards.composition import check_curriculum
from grpo_core.system.processes import importing

if TYPE_CHECKING:
    from grpo_core.rollout.collect import Sample

PROMPTS = 4096  # sampled together; a line of progress follows
TENTHS = 10  # bars of the histogram


def probe(run: Path, output: Path) -> dict[str, Any]:
    """Sample `data.curriculum.probe` completions of each training prompt, as the training would, and write their pass
    rates, and the right ones as demonstrations, under `output`. Several processes share the prompts.

    Returns the `summary` of the rates, and the demonstrations' sizes; {} except in the main process. Raises ConfigError
    if no reward says what passes.
    """
    with importing():
        from grpo_core.data.order import derive_seed
        from grpo_core.distributed import own_range, wait_for_all
        from grpo_core.evaluation.sampling import load_sampling
        from grpo_core.rewards.composition import passed
        from grpo_core.rollout.collect import sample_and_score, share_samples
        from grpo_core.rollout.requests import training_sampling
        from grpo_core.rollout.types import Request

    config = load_config(run / run_files.CONFIG)
    check_curriculum(config)
    session = load_sampling(config, {"train": run_files.prompts(run, "train")}, config.rollout.max_completion_length)
    ids, n, is_main = session.sets["train"].ids, config.data.curriculum.probe, session.processes.is_main_process
    sampling = training_sampling(config.rollout)

    def sample(prompts: range) -> tuple[list[Sample], float]:
        rows = [prompts[place] for place in own_range(len(prompts))]
        # Three numbers, so that no other request has this seed: four are a training's, two an evaluation's.
        requests = [Request(ids[row], n, derive_seed(config.seed, row, n), row=row) for row in rows]
        return sample_and_score(session.engine, requests, sampling, session.sets["train"], session.scoring)

    rates, shown = no_rates(len(ids)), output / run_files.SHOWN.name
    with pq.ParquetWriter(shown, SCHEMA) if is_main else nullcontext() as file:
        for first in range(0, len(ids), PROMPTS):
            prompts = range(first, min(first + PROMPTS, len(ids)))
            samples, *_ = share_samples(partial(sample, prompts))
            given, of = np.array([sample.rewards for sample in samples]), [sample.row for sample in samples]
            sources = [session.sets["train"].rows[row].get("source") for row in of]
            shares = passed(given, config, sources)
            rates = with_samples(rates, np.array(of), shares, step=0)
            if file:
                file.write_table(pa.Table.from_pylist(right_ones(samples, shares), SCHEMA))
                print(f"probe: {prompts[-1] + 1:,} of {len(ids):,} prompts, {n} completions each", flush=True)
    wait_for_all()
    session.engine.close()
    if is_main:
        write_rates(rates, output / run_files.PASS_RATES)
    session.processes.end_training()
    return {**summary(rates), run_files.DEMONSTRATIONS: read_demonstrations(shown).figures} if is_main else {}


def right_ones(samples: Sequence[Sample], shares: Iterable[float]) -> list[dict[str, Any]]:
    """The samples that pass in full as demonstrations, each prompt's different ones once (rejection sampling
    fine-tuning, arXiv:2308.01825): the tokens as sampled, without completions that the length limit cut.

    shares: how far each sample passes, see `passed` (B,).
    """
    found = {}
    for sample, share in zip(samples, shares, strict=True):
        ids = sample.completion.ids
        if share == 1 and not sample.completion.truncated:
            trained = sample.completion.mask or [1] * len(ids)
            row = {"prompt_ids": sample.prompt_ids, "completion_ids": ids, "trained_tokens": trained}
            found.setdefault((sample.row, *ids), row)
    return [*found.values()]


def summary(rates: PassRates) -> dict[str, Any]:
    """Prompts in all, with a rate, never and always solved; the mean rate; and how many prompts have a rate in each
    tenth from 0 to 1, of which the last includes 1."""
    found = rates.rate[rates.known]
    return {
        "prompts": len(rates.passed),
        "scored": len(found),
        "never": int((found == 0).sum()),
        "always": int((found == 1).sum()),
        "mean": float(found.mean()) if len(found) else None,
        "histogram": np.histogram(found, TENTHS, (0.0, 1.0))[0].tolist(),
    }
