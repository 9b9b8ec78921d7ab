"""What a run has exported against its trained policy: paired differences on the prompts of the run's evaluation."""

from __future__ import annotations

import functools
import json
import operator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from grpo_core import run_files
from grpo_core.config.files import load_config
from grpo_core.config.inputs import ModelConfig
from grpo_core.config.run import RunConfig
from grpo_core.data.units import paired_units
from grpo_core.evaluation.outcomes import bounds_of, outcomes, unit_name, unit_numbers
from grpo_core.evaluation.samples import answers_of, prompt_columns, samples_table
from grpo_core.evaluation.statistics import paired_difference
from grpo_core.planning.plan import load_plan
from grpo_core.rewards.trl_arguments import TrainerState
from grpo_core.system.processes import importing

TRAINED, EXPORTED = "trained", "exported"


def evaluate_exported(run: Path, folder: Path) -> dict[str, Any]:
    """Sample from what is in `folder`, with its own tokenizer and in its own precision, as the run's evaluation sampled
    from the trained policy, whose recorded answers are taken. Returns the report; {} in all processes but the main."""
    with importing():
        import torch
        from transformers import AutoConfig

        from grpo_core.distributed import wait_for_all
        from grpo_core.evaluation.sampling import answers_of_base, load_sampling
        from grpo_core.model.pretrained import from_pretrained

    config = load_config(run / run_files.CONFIG)
    files = {name: run_files.prompts(run, file) for name, file in config.evaluation_files.items()}
    plan = load_plan(run / run_files.PLAN)
    sections: dict[str, Any] = {"model": ModelConfig(name_or_path=str(folder))}
    if from_pretrained(AutoConfig, folder).get_text_config().dtype == torch.bfloat16:
        sections["train"] = config.train.model_copy(update={"mixed_precision": "bf16"})
    state = TrainerState.after(plan.max_steps, plan)
    session = load_sampling(config.model_copy(update=sections), files, config.evaluation_length, state)
    session.engine.sync_weights(session.base)  # servers have those of the run's base
    exported = answers_of_base(session, EXPORTED)
    wait_for_all()
    session.engine.close()
    report: dict[str, Any] = {}
    if session.processes.is_main_process:
        prompts = {
            name: prompt_columns(name, of_set.rows, config, pictured=of_set.images is not None)
            for name, of_set in session.sets.items()
        }
        parts = (prompts, answers_of(TRAINED, run / run_files.EVALUATION / run_files.SAMPLES, prompts), exported)
        scores = [f"{policy}/rewards/{it.name}" for policy in (TRAINED, EXPORTED) for it in session.scoring.rewards]
        columns = [functools.reduce(operator.or_, (part[name] for part in parts)) for name in prompts]
        samples = pl.concat([samples_table(of_set, scores) for of_set in columns], how="diagonal")
        evaluated = json.loads((run / run_files.EVALUATION / run_files.REPORT).read_text())
        report = compare(samples, config, config.promotion.metric or evaluated["deciding_metric"])
    session.processes.end_training()
    return report


def compare(samples: pl.DataFrame, config: RunConfig, metric: str) -> dict[str, Any]:
    """For each evaluation set both means, the paired difference, and the number of equal answers among all."""
    sets: dict[str, Any] = {}
    for name in config.evaluation_files:
        before, after = (
            outcomes(samples, name, policy, metric, config.rewards, config.accuracy_reward)
            for policy in (TRAINED, EXPORTED)
        )
        pairs = paired_units(before, after, unit_numbers(samples, name))
        of_set = samples.filter(set=name)
        sets[name] = {
            TRAINED: float(np.nanmean(before)),
            EXPORTED: float(np.nanmean(after)),
            "difference": asdict(paired_difference(*pairs, config.evaluation.confidence, bounds_of(metric, config))),
            "units": unit_name(samples),
            "answers": of_set.height,
            "equal": int((of_set[f"{TRAINED}/completion"] == of_set[f"{EXPORTED}/completion"]).sum()),
        }
    return {"metric": metric, "sets": sets}
