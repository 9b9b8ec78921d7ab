"""`[teacher]`: a frozen model that teaches on the policy's own completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from grpo_core.config.base import Section
from grpo_core.config.inputs import ModelConfig

if TYPE_CHECKING:
    from grpo_core.config.run import RunConfig


class TeacherConfig(Section):
    model: str | None = None
    """Hugging Face model folder or hub name of a model with the policy's tokenizer: on-policy distillation. It gives
    each token that the policy samples a log-probability, and is not trained. Default: no teacher."""
    revision: str | None = None
    """Hub revision (branch, tag or commit) of the teacher; only for hub names."""
    weight: float = Field(1.0, gt=0)
    """λ of the advantage of each token, A − λ·(log π_old − log π_teacher): what the reverse KL to the teacher counts
    beside the rewards. Rewards of weight 0 are measured, and the teacher teaches alone: rollout.num_generations may
    then be 1."""
    divergence_beta: float | None = Field(None, ge=0, le=1)
    """With it, the loss of each token gets λ times the divergence between the teacher's distribution and the policy's,
    instead of the advantage: 0 forward KL, 1 reverse KL, between them generalised Jensen-Shannon divergence (TRL's
    beta). Default: the advantage."""
    divergence_top_k: int = Field(0, ge=0)
    """Compare on the teacher's k likeliest tokens, with all others as one more outcome. 0: each token of the vocabulary
    is an outcome."""

    @model_validator(mode="after")
    def _keys_need_a_teacher(self) -> TeacherConfig:
        given = [key for key in type(self).model_fields if getattr(self, key) != type(self).model_fields[key].default]
        if given and self.model is None:
            raise ValueError(f"{given[0]}={getattr(self, given[0])!r} is for a teacher; set model, or remove it")
        if self.divergence_top_k and self.divergence_beta is None:
            raise ValueError(
                f"divergence_top_k={self.divergence_top_k} is for a divergence; set divergence_beta, or remove it"
            )
        return self

    @property
    def diverges(self) -> bool:
        """True if a divergence is part of the loss."""
        return self.model is not None and self.divergence_beta is not None

    @property
    def is_used(self) -> bool:
        return self.model is not None

    @property
    def as_model(self) -> ModelConfig:
        """The keys of `[model]` that load the teacher."""
        assert self.model is not None
        return ModelConfig(name_or_path=self.model, revision=self.revision)


def teaches_alone(config: RunConfig) -> bool:
    """True if a teacher teaches and no reward counts: a group may then have one completion."""
    return config.teacher.is_used and not any(reward.weight for reward in config.rewards)


def teacher_problem(config: RunConfig) -> str:
    """Problem of a teacher with other keys; "" if there is none."""
    if config.teacher.is_used and config.rollout.dynamic_sample:
        return (
            f"rollout.dynamic_sample=true with teacher.model={config.teacher.model!r}: groups whose rewards are equal "
            "are replaced, and the teacher teaches there; remove one of the two"
        )
    if config.teacher.diverges and config.train.sharding != "none":
        return (
            f"teacher.divergence_beta={config.teacher.divergence_beta:g} with train.sharding="
            f"{config.train.sharding!r}: a divergence reads the output layers of both models, whole, also in the "
            "backward pass; remove one of the two"
        )
    return ""
