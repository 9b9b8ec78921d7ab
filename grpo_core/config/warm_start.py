"""`[warm_start]`: supervised training on demonstrations, from whose model the run's training begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from grpo_core.config.algorithm import AlgorithmConfig
from grpo_core.config.base import MAX_COUNT, Section
from grpo_core.config.environment import EnvironmentConfig
from grpo_core.config.inputs import CurriculumConfig
from grpo_core.config.rollout import RolloutConfig
from grpo_core.config.teacher import TeacherConfig

if TYPE_CHECKING:
    from grpo_core.config.run import RunConfig


FROM_PROBE = "probe"  # as demonstrations: the probe's own completions


class WarmStartConfig(Section):
    demonstrations: str | None = None
    """Demonstrations: a .parquet, .jsonl, .json or .csv file, a dataset saved to disk, or a hub name, with the column
    `messages`, or `prompt` and `completion`; or the folder of a finished run, such as storage/runs/NAME: the right
    completions of its training; or "probe": the right completions of data.curriculum.probe. The policy is first trained
    on what the assistant says there, and GRPO begins from that model, which is also its reference policy. Default: no
    warm start."""
    split: str = "train"
    """Split to take when `demonstrations` is a hub name or a saved DatasetDict."""
    revision: str | None = None
    """Hub revision (branch, tag or commit) of the demonstrations; only for hub names."""
    num_train_epochs: float = Field(1.0, gt=0, le=MAX_COUNT)
    """Passes over the demonstrations; may be fractional."""
    max_steps: int | None = Field(None, ge=1)
    """Optimizer updates; overrides num_train_epochs."""
    batch_size: int = Field(16, ge=1)
    """Demonstrations per optimizer update, over all processes: a multiple of train.num_processes."""
    learning_rate: float = Field(2e-5, gt=0)
    """AdamW's peak learning rate, which falls linearly to 0. An adapter usually takes ten times as much."""

    @model_validator(mode="after")
    def _keys_need_demonstrations(self) -> WarmStartConfig:
        given = [key for key in type(self).model_fields if getattr(self, key) != type(self).model_fields[key].default]
        if given and self.demonstrations is None:
            raise ValueError(
                f"{given[0]}={getattr(self, given[0])!r} is for a warm start; set demonstrations, or remove it"
            )
        if self.from_probe and (where := [key for key in given if key in ("split", "revision")]):
            raise ValueError(f"{where[0]}={getattr(self, where[0])!r} with demonstrations='probe'; remove it")
        return self

    @property
    def is_used(self) -> bool:
        return self.demonstrations is not None

    @property
    def from_probe(self) -> bool:
        return self.demonstrations == FROM_PROBE

    @property
    def source(self) -> str | None:
        """File, data set or run of the demonstrations; None without a warm start, and with one from the probe."""
        return None if self.from_probe else self.demonstrations


def warm_start_problem(config: RunConfig) -> str:
    """Problem of a warm start with other keys; "" if there is none."""
    keys, train = config.warm_start, config.train
    if keys.from_probe and not config.data.curriculum.probe:
        return (
            "warm_start.demonstrations='probe' with data.curriculum.probe=0: there are no completions to train on; set "
            "data.curriculum.probe to 8, for instance, or name a file (one called probe: './probe')"
        )
    if keys.is_used and keys.batch_size % train.num_processes:
        return (
            f"warm_start.batch_size={keys.batch_size} is not a multiple of train.num_processes={train.num_processes}, "
            f"which share each update; set it to {-(-keys.batch_size // train.num_processes) * train.num_processes}"
        )
    return ""


def supervised(config: RunConfig, longest_completion: int) -> RunConfig:
    """The configuration of the warm start itself: a training without engine and rewards, whose groups are one
    demonstration each. `longest_completion`: tokens after the prompt, of the longest demonstration. Low entropy,
    which demonstrations are to teach, breaks no limit of `[health]`.

    The loss of cispo with a ratio of 1 and an advantage of 1 is −log π of each trained token, and its mean over the
    tokens of an update the supervised loss. It is not validated: no user may ask for a training without rewards.
    """
    keys, train, share = config.warm_start, config.train, config.warm_start.batch_size // config.train.num_processes
    most = min(share, train.per_device_train_batch_size)
    micro_batch = next(size for size in range(most, 0, -1) if share % size == 0)
    optimizing = {
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": share // micro_batch,
        "num_train_epochs": keys.num_train_epochs,
        "max_steps": keys.max_steps,
        "learning_rate": keys.learning_rate,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0,
        **dict.fromkeys(("steps_per_generation", "generation_batch_size", "eval_steps", "early_stopping_patience")),
        "num_iterations": 1,
        "load_best_model_at_end": False,
    }
    rollout = RolloutConfig(num_generations=1, max_completion_length=longest_completion)
    algorithm = AlgorithmConfig(
        loss_type="cispo",
        epsilon_high=1.0,
        vllm_importance_sampling_correction=False,
        router_aux_loss_coef=config.algorithm.router_aux_loss_coef,
    )
    return config.model_copy(
        update={
            "warm_start": WarmStartConfig(),
            "data": config.data.model_copy(update={"curriculum": CurriculumConfig(), "sources": []}),
            "rewards": [],
            "rollout": rollout.model_copy(update={"engine": "recorded"}),
            "algorithm": algorithm,
            "train": train.model_copy(update=optimizing),
            "health": config.health.model_copy(update={"min_entropy": 0.0}),
            "teacher": TeacherConfig(),
            "environment": EnvironmentConfig(),
        }
    )
