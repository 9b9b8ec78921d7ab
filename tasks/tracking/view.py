"""The runs of an experiment as MLflow first shows them: a saved view with the columns that say what came of each run.

MLflow has no interface for saved views. This is the form in which its page keeps them (3.17), in a tag of the
experiment: another release that does not know it shows its usual columns.
"""

from __future__ import annotations

import base64
import json
import zlib

from grpo_core.config.evaluation import HELD_OUT

VIEW = "grpo-results"
KIND = "mlflow.experimentKind"
MODEL_TRAINING = "custom_model_development"
_TRAINED, _GAIN = f"eval/{HELD_OUT}/trained", f"eval/{HELD_OUT}/difference/base/accuracy"
METRICS = (
    *(f"{_TRAINED}/accuracy", f"{_TRAINED}/accuracy/low", f"{_TRAINED}/accuracy/high"),
    *(f"{_GAIN}/mean", f"{_GAIN}/low", f"{_GAIN}/high", f"{_TRAINED}/reward"),
    *("cost/gpu_hours", "cost/money", "cost/sampled_tokens"),
)
COLUMNS = [*(f"metrics.`{name}`" for name in METRICS), "tags.`hardware`", "attributes.`Models`"]


def experiment_tags() -> dict[str, str]:
    """Tags by which MLflow opens an experiment as model training, and which hold the view."""
    state = {
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "modelVersionFilter": "All Runs",
        "datasetsFilter": [],
        "selectedColumns": COLUMNS,
        "columnOrder": COLUMNS,
        "columnWidths": dict.fromkeys(COLUMNS[: len(METRICS)], 250),
        "runsHiddenMode": "FIRST_10_RUNS",
        "hideEmptyCharts": True,
    }
    packed = base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()
    view = {"name": "Results", "createdAt": 0, "updatedAt": 0, "state": f"deflate;{packed}"}
    return {KIND: MODEL_TRAINING, f"mlflow.sharedViewState.{VIEW}": json.dumps(view)}
