"""What the sampling settings of a run mean that their names do not say. Imports no torch."""

from __future__ import annotations

import json

from grpo_core.config.run import RunConfig
from grpo_core.planning.shapes import ForecastError, config_file

FILE = "generation_config.json"
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def sampling_notes(config: RunConfig) -> list[str]:
    """Sentences about sampling that leaves tokens out, and about settings of the base that are not taken over."""
    return [*_truncation(config), *_settings_of_base(config)]


def truncating_keys(config: RunConfig) -> str:
    """The keys by which training leaves unlikely tokens out, with their values; "" if there are none."""
    values = {name: getattr(config.rollout, name) for name in ("top_p", "top_k", "min_p")}
    return ", ".join(f"rollout.{name} = {value:g}" for name, value in values.items() if value != NEUTRAL[name])


def _truncation(config: RunConfig) -> list[str]:
    keys = truncating_keys(config)
    if not keys:
        return []
    said = (
        f"{keys}: the policy that is trained is the one that samples, without the unlikely tokens: ratio, loss and "
        "entropy are over those that are left. A token that is never sampled is never learned"
    )
    if config.rollout.engine == "recorded":
        return [said]
    return [
        f"{said}; the training says after its first generation batch how many sampled tokens the trainer would leave "
        "out (sampling/outside_share)"
    ]


def _settings_of_base(config: RunConfig) -> list[str]:
    try:
        values = json.loads(config_file(config.model.name_or_path, config.model.revision, FILE).read_text())
        own = {name: float(values[name]) for name in NEUTRAL if values.get(name) is not None}
    except (ForecastError, OSError, ValueError, TypeError, AttributeError):  # no such file here, or not readable
        return []
    other = {name: value for name, value in own.items() if value != getattr(config.rollout, name)}
    if not other:
        return []
    theirs = ", ".join(f"{name} = {value:g}" for name, value in other.items())
    ours = ", ".join(f"rollout.{name} = {getattr(config.rollout, name):g}" for name in other)
    return [
        f"the base's {FILE} has {theirs}, which is not taken over: training samples with {ours}, and the evaluation as "
        "[evaluation] says"
    ]
