"""`[teacher]`: a frozen model that teaches on the policy's own completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from grpo_core.config.base import Section
from grpo_core.config.inputs import ModelConfig
from grpo_core.system.addresses import holds_secret

if TYPE_CHECKING:
    from grpo_core.config.run import RunConfig


class TeacherConfig(Section):
    model: str | None = None
    """Hugging Face model folder or hub name of a model with the policy's tokenizer: on-policy distillation. It gives
    each token that the policy samples a log-probability, and is not trained. With `url`, the name under which the
    server has the teacher. Default: no teacher."""
    url: str | None = None
    """Address of a running vLLM server, such as http://10.0.0.5:8000, that gives the log-probabilities: the training
    loads no teacher. Without `model`, the server's own model is the teacher, and the training knows it by this address;
    with `model`, by that name, at whichever address."""
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
        if given and not self.is_used:
            raise ValueError(f"{given[0]}={getattr(self, given[0])!r} is for a teacher; set model, or remove it")
        if self.url is not None and (wrong := {"revision", "divergence_beta", "divergence_top_k"} & {*given}):
            raise ValueError(
                f"{min(wrong)} with url={self.url!r}: a server has loaded its model, and gives the log-probability of "
                f"the sampled token alone; remove {min(wrong)}, or name the model to load instead of url"
            )
        if self.url is not None and holds_secret(self.url):
            raise ValueError(
                "url contains a user, password or token, which would be recorded: leave it out, and set the server's "
                "key in the environment variable GRPO_TEACHER_API_KEY"
            )
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url: {self.url!r} is not an address such as http://10.0.0.5:8000")
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
        return self.model is not None or self.url is not None

    @property
    def is_loaded(self) -> bool:
        """True if the training loads the teacher: no server has it."""
        return self.model is not None and self.url is None

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
            f"rollout.dynamic_sample=true with the teacher {config.teacher.model or config.teacher.url!r}: groups "
            "whose rewards are equal are replaced, and the teacher teaches there; remove one of the two"
        )
    if config.teacher.url is not None and config.rollout.temperature != 1:
        return (
            f"rollout.temperature={config.rollout.temperature:g} with teacher.url={config.teacher.url!r}: a server "
            "gives the teacher's log-probabilities at temperature 1, and the policy's would be at another one; set it "
            "to 1, or let the training load the teacher (teacher.model without url)"
        )
    if config.teacher.diverges and config.train.sharding != "none":
        return (
            f"teacher.divergence_beta={config.teacher.divergence_beta:g} with train.sharding="
            f"{config.train.sharding!r}: a divergence reads the output layers of both models, whole, also in the "
            "backward pass; remove one of the two"
        )
    return ""
