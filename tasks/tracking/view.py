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
RESULT = "result"  # tag of a run: its figure with the interval, and the gain, as text
SWEEP = "sweep"  # tag of a run: the sweep that it is, or is an arm of
COLUMNS = {  # and their widths in pixels
    f"tags.`{RESULT}`": 350,
    "metrics.`reward`": 110,
    "metrics.`cost/gpu_hours`": 120,
    "metrics.`cost/money`": 100,
    "metrics.`cost/sampled_tokens`": 160,
    f"metrics.`eval/{HELD_OUT}/trained/accuracy`": 210,
    f"metrics.`eval/{HELD_OUT}/trained/reward`": 210,
    "tags.`hardware`": 160,
    "attributes.`Models`": 160,
    f"tags.`{SWEEP}`": 160,
}


def experiment_tags() -> dict[str, str]:
    """Tags by which MLflow opens an experiment as model training, and which hold the view."""
    state = {
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "modelVersionFilter": "All Runs",
        "datasetsFilter": [],
        "selectedColumns": [*COLUMNS],
        "columnOrder": [*COLUMNS],
        "columnWidths": COLUMNS,
        "runsHiddenMode": "FIRST_10_RUNS",
        "hideEmptyCharts": True,
    }
    packed = base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()
    view = {"name": "Results", "createdAt": 0, "updatedAt": 0, "state": f"deflate;{packed}"}
    return {KIND: MODEL_TRAINING, f"mlflow.sharedViewState.{VIEW}": json.dumps(view)}
