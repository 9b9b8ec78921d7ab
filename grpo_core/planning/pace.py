"""Pace at which a machine trains a model: known from earlier runs, measured, or assumed for a GPU. Imports no torch.

`grpo_core.pace` answers a `PaceRequest` with a `Pace`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_core.config.memory_bounds import MAX_ROWS
from grpo_core.config.run import RunConfig
from grpo_core.planning.plan import Plan
from grpo_core.planning.shapes import PromptLengths

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop"),
    *("max_completion_length", "num_generations", "engine"),
)
TRAINING = ("mixed_precision", "gradient_checkpointing", "per_device_train_batch_size", "optim", "offload")


@dataclass(frozen=True)
class Throughput:
    """Pace of earlier runs."""

    tokens_per_second: float  # of one process; prompts and completions
    completion_tokens: float  # mean of a completion; of a conversation, its environment's tokens too
    how: str
    other_seconds: float = 0.0  # of a training, outside its updates: start, evaluations, checkpoints
    sample_seconds: float | None = None  # in which one process samples and scores a completion; None: not known


@dataclass(frozen=True)
class EnvironmentPace:
    """Cost of a conversation besides the policy's tokens, as rehearsed: seconds and tokens of its begin and end
    (`reset`, `get_reward`), and of one call of the slowest tool."""

    frame_seconds: float
    frame_tokens: float
    call_seconds: float
    call_tokens: float


@dataclass(frozen=True)
class ValidatedCosts:
    """What validation finds out about the time of a run; None: not known, or there is no environment."""

    held_out_prompts: int | None = None  # sampled in each evaluation
    reward_seconds: float | None = None  # of all rewards, per completion
    environment: EnvironmentPace | None = None


NOT_VALIDATED = ValidatedCosts()


@dataclass(frozen=True)
class PaceRequest:
    """Request to measure `completions` sampled together, then `per_device_train_batch_size` of them trained on.

    `prompts`: a Parquet file whose first prompts are sampled; "" for random tokens. `identity`: hash of everything else
    that the answer depends on: the model's files, hardware, versions.
    """

    model: dict[str, Any]
    rollout: dict[str, Any]  # the keys SAMPLING
    train: dict[str, Any]  # the keys TRAINING, and the plan's max_tokens_per_pass
    completions: int
    prompt_tokens: int
    prompts: str
    chat_template_kwargs: dict[str, Any]
    folder: str  # where checkpoints would be written
    threads: int  # CPU threads per process
    identity: str


@dataclass(frozen=True)
class Pace:
    """Seconds measured on one process, and the mean length of a completion in them."""

    sample_seconds: float  # `completions` of a PaceRequest
    train_seconds: float  # forward and backward pass of one micro-step
    step_seconds: float  # the optimizer's
    start_seconds: float  # imports, loading and preparing the model
    byte_seconds: float  # per byte of a checkpoint
    completion_tokens: float
    completions: int  # of the request
    how: str


def pace_request(
    config: RunConfig,
    plan: Plan,
    lengths: PromptLengths,
    prompts: Path | None,
    folder: Path,
    threads: int,
    identity: str,
) -> PaceRequest:
    """The request whose answer tells the pace of a run."""
    group, per_process = plan.num_generations, -(-plan.generation_batch_size // plan.num_processes)
    return PaceRequest(
        config.model.model_dump(mode="json", exclude={"adapter"}),
        {key: getattr(config.rollout, key) for key in SAMPLING},
        {key: getattr(config.train, key) for key in TRAINING} | {"max_tokens_per_pass": plan.max_tokens_per_pass},
        max(min(per_process, MAX_ROWS) // group, 1) * group,
        max(round(lengths.mean), 1),
        str(prompts) if prompts else "",
        config.data.chat_template_kwargs,
        str(folder),
        threads,
        identity,
    )
