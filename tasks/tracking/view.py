"""The saved view in which MLflow first shows an experiment's runs, with columns and charts of each run's results.

MLflow has no interface for saved views. This is the form in which its page (3.17) keeps them in a tag of the
experiment. A release that does not know this form shows its usual columns.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

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
CHARTS = {  # shown first; MLflow hides empty ones
    "reward": "LINE",
    f"eval/{HELD_OUT}/trained/accuracy": "BAR",
    "cost/gpu_hours": "BAR",
    "cost/sampled_tokens": "BAR",
    "eval_reward": "LINE",
    f"eval/{HELD_OUT}/trained/reward": "BAR",
    "entropy": "LINE",
    "completions/mean_length": "LINE",
}
SECTION = {"uuid": "first", "name": "To look at first", "display": True, "isReordered": True}


def experiment_tags() -> dict[str, str]:
    """Tags of an experiment: they hold the view, and make MLflow open the experiment as model training."""
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
        "compareRunSections": [SECTION],
        "compareRunCharts": [_chart(metric, kind) for metric, kind in CHARTS.items()],
        "isAccordionReordered": True,
    }
    packed = base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()
    view = {"name": "Results", "createdAt": 0, "updatedAt": 0, "state": f"deflate;{packed}"}
    return {KIND: MODEL_TRAINING, f"mlflow.sharedViewState.{VIEW}": json.dumps(view)}


def _chart(metric: str, kind: str) -> dict[str, Any]:
    chart = {"type": kind, "uuid": metric, "metricKey": metric, "metricSectionId": SECTION["uuid"]}
    chart |= {"deleted": False, "isGenerated": False, "runsCountToCompare": 10}
    if kind == "BAR":
        return chart
    chart |= {"selectedMetricKeys": [metric], "xAxisKey": "step", "selectedXAxisMetricKey": "", "range": {}}
    chart |= {"scaleType": "linear", "xAxisScaleType": "linear", "lineSmoothness": 0}
    return chart | {"useGlobalLineSmoothing": True, "useGlobalXaxisKey": True}
