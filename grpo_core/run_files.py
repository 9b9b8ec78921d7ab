"""Names of files and folders in a run directory. Imports nothing heavy, since quick commands read it."""

from __future__ import annotations

import os
from pathlib import Path

is_file = os.path.isfile  # False for a name too long for any file, at which Path's raises

CONFIG = "config.toml"
DATASET = "dataset"
PLAN = "plan.json"
PROBE = "probe"
WARM_START = "warm-start"
TRAINING = "training"
EVALUATION = "evaluation"
PUBLISHED = "published"

DEMONSTRATIONS = "demonstrations"  # data set of a warm start
IMAGES = "images.parquet"  # of all data sets, if they have any

# In the folder of a training.
METRICS = "metrics.jsonl"
FINDINGS = "health.jsonl"
COMPLETIONS = "completions"
CHECKPOINTS = "checkpoints"
HELD_OUT_SCORES = "held_out"
BEST = "best"
MODEL = "model"
ADAPTER = "adapter"
RESULT = "result.json"
PASS_RATES = "pass_rates.parquet"
PROBED = Path(PROBE, PASS_RATES)  # those of the base model
SHOWN = Path(PROBE, f"{DEMONSTRATIONS}.parquet")  # its right completions

# In the folder of an evaluation.
SAMPLES = "samples.parquet"
REPORT = "report.json"  # also of a probe, and of the validated data


def prompts(run: Path, name: str) -> Path:
    """File with the validated prompts of a data set, such as "train"."""
    return run / DATASET / f"{name}.parquet"


def is_run(source: str) -> bool:
    """True if this is the path of a run directory, which no other source of data looks like."""
    return is_file(Path(source, CONFIG))


def unfinished(output: str) -> str:
    """Name of an output until it is complete."""
    return f"{output}.partial"
