"""Places of pass rates in a run directory. Imports nothing heavy, since quick commands read it."""

from __future__ import annotations

from pathlib import Path

PASS_RATES = "pass_rates.parquet"  # in the folder of a training
PROBED = Path("probe", PASS_RATES)  # those of the base model
