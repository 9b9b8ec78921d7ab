"""`[teacher]`: a frozen model, or the policy itself with a text in its prompt, that teaches on the policy's own
completions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from grpo_core.config.base import Section
from grpo_core.config.columns import template_parts
from grpo_core.config.inputs import ModelConfig
from grpo_core.system.addresses import holds_secret, is_web_address

if TYPE_CHECKING:
    from grpo_core.config.run import RunConfig

PROMPT, BETTER, ERROR = "prompt", "better", "error"  # places of a template that are no columns


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
    template: str | None = None
    """Text that the teacher reads in the place of the prompt's last user message, and the policy never does. Places in
    braces: `{prompt}`, that message; columns such as `{answer}`; `{better}`, the best other completion of the group, if
    its reward is higher; `{error}`, errors of the conversation's tools. Without `model` and `url`, the policy teaches
    itself (self-distillation). Default: the teacher reads what the policy reads."""
    update_rate: float | None = Field(None, gt=0, lt=1)
    """A policy that teaches itself does so with a moving average of its weights, which each update moves: average ← (1
    − update_rate) · average + update_rate · policy (TRL's teacher_update_rate, 0.05 in SDPO). It is kept in float32.
    Default: with the weights from before the first update on the batch; for a divergence, as it is in each update."""
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
        if self.update_rate is not None and not self.is_policy:
            raise ValueError(
                f"update_rate={self.update_rate:g} averages a policy that teaches itself: set template, without model "
                "and url, or remove update_rate"
            )
        given = [key for key in type(self).model_fields if getattr(self, key) != type(self).model_fields[key].default]
        if given and not self.is_used:
            raise ValueError(
                f"{given[0]}={getattr(self, given[0])!r} is for a teacher; set model, url or template, or remove it"
            )
        if self.revision is not None and self.is_policy:
            raise ValueError(f"revision={self.revision!r} is of a model; set model, or remove it")
        if self.model == "self":
            raise ValueError("model='self': the policy teaches itself where template is set; remove model")
        if self.url is not None and (wrong := {"revision", "divergence_beta", "divergence_top_k"} & {*given}):
            raise ValueError(
                f"{min(wrong)} with url={self.url!r}: a server has loaded its model, and gives the log-probability of "
                f"the sampled token alone; remove {min(wrong)}, or url, so that the training loads teacher.model"
            )
        if self.url is not None and holds_secret(self.url):
            raise ValueError(
                "url contains a user, password or token, which would be recorded: leave it out, and set the server's "
                "key in the environment variable GRPO_TEACHER_API_KEY"
            )
        if self.url is not None and not is_web_address(self.url):
            raise ValueError(f"url: {self.url!r} is not an address such as http://10.0.0.5:8000")
        if self.url is not None and self.url.rstrip("/").endswith("/v1"):
            raise ValueError(
                f"url={self.url!r} ends in /v1: leave /v1 out, since the server's /health and /detokenize are asked too"
            )
        if self.divergence_top_k and self.divergence_beta is None:
            raise ValueError(
                f"divergence_top_k={self.divergence_top_k} is for a divergence; set divergence_beta, or remove it"
            )
        if self.template is not None:
            self._check_template(self.template)
        return self

    def _check_template(self, template: str) -> None:
        """Raises ValueError for a template that shows nothing."""
        try:
            places = self.places
        except ValueError as error:
            raise ValueError(f"template={template!r}: {error}") from None
        if PROMPT not in places:
            raise ValueError(
                f"template={template!r} is read in the place of the prompt's last user message, and leaves that out; "
                "put {prompt} where it belongs"
            )
        if template.strip() == "{prompt}":
            raise ValueError(f"template={template!r} shows the prompt alone; add what the teacher should know")

    @property
    def places(self) -> list[str]:
        """Names in the template's braces, as often as they are there."""
        return [place for _, place in template_parts(self.template or "") if place]

    @property
    def columns(self) -> list[str]:
        """Columns of the training prompts that the template shows."""
        return [*dict.fromkeys(place for place in self.places if place not in (PROMPT, BETTER, ERROR))]

    @property
    def shown_completions(self) -> int:
        """Texts in a filled template that may each be as long as a completion."""
        return sum(place in (BETTER, ERROR) for place in self.places)

    @property
    def is_policy(self) -> bool:
        """True if the policy teaches itself."""
        return self.template is not None and self.model is None and self.url is None

    @property
    def recorded_as(self) -> str:
        """Column of a recording with a served teacher's log-probabilities; "" if another teaches, and for a template,
        whose prompts follow from more than the recording."""
        return f"teacher_logprobs/{self.model or self.url}" if self.url and self.template is None else ""

    @property
    def read_at_most(self) -> str:
        """What the longest sequence is that the teacher reads, for messages."""
        made = "" if self.template is None else " that teacher.template makes,"
        return f"the longest prompt{made} plus completion"

    @property
    def named(self) -> str:
        """The key that makes a teacher, with its value."""
        keys = ("model", "url", "template")
        return next(f"teacher.{key}={value!r}" for key in keys if (value := getattr(self, key)) is not None)

    @property
    def diverges(self) -> bool:
        """True if a divergence is part of the loss."""
        return self.divergence_beta is not None

    @property
    def is_used(self) -> bool:
        return self.model is not None or self.url is not None or self.template is not None

    @property
    def is_loaded(self) -> bool:
        """True if the training loads the teacher: no server has it."""
        return self.model is not None and self.url is None

    @property
    def teaches_silent_groups(self) -> bool:
        """True if it teaches groups whose rewards are equal. With `{better}` it does not: none of them is better."""
        return self.is_used and BETTER not in self.places

    @property
    def as_model(self) -> ModelConfig:
        """The keys of `[model]` that load the teacher."""
        assert self.model is not None
        return ModelConfig(name_or_path=self.model, revision=self.revision)


def teaches_alone(config: RunConfig) -> bool:
    """True if a teacher teaches and no reward counts: a group may then have one completion."""
    return config.teacher.is_used and not any(reward.weight for reward in config.rewards)


def source_teachers(config: RunConfig) -> dict[str, str]:
    """Name of the model that teaches each source, "" where none does; empty if no source names a teacher. A folder that
    is spelled in several ways has its first spelling."""
    sources, model = config.data.sources, config.teacher.model or ""
    if all(source.teacher is None for source in sources):
        return {}
    named = {it.name: model if it.teacher is None else it.teacher for it in sources}
    first = {Path(model).resolve(): model}
    return {source: name and first.setdefault(Path(name).resolve(), name) for source, name in named.items()}


def loaded_teachers(config: RunConfig) -> dict[str, ModelConfig]:
    """Each teacher that the training loads, once, by the first key that names it."""
    if not config.teacher.is_loaded:
        return {}
    found = {config.teacher.model: ("teacher.model", config.teacher.as_model)}
    for place, name in enumerate(source_teachers(config).values()):
        if name:
            found.setdefault(name, (f"data.sources.{place}.teacher", ModelConfig(name_or_path=name)))
    return dict(found.values())


def teacher_problem(config: RunConfig) -> str:
    """Problem of a teacher with other keys; "" if there is none."""
    if problem := _source_problem(config):
        return problem
    if config.rollout.dynamic_sample and config.teacher.teaches_silent_groups:
        return (
            f"rollout.dynamic_sample=true with {config.teacher.named}: groups whose rewards are equal "
            "are replaced, and the teacher teaches there; remove one of the two, or show {better} in teacher.template"
        )
    if config.rollout.dynamic_sample and teaches_alone(config):
        return (
            f"rollout.dynamic_sample=true with {config.teacher.named} and no reward with a weight: every group would "
            "be replaced, since no advantage tells its completions apart; remove dynamic_sample"
        )
    if config.teacher.url is not None and config.rollout.temperature != 1:
        return (
            f"rollout.temperature={config.rollout.temperature:g} with teacher.url={config.teacher.url!r}: a server "
            "gives the teacher's log-probabilities at temperature 1, and the policy's would be at another one; set it "
            "to 1, or let the training load the teacher (teacher.model without url)"
        )
    return _template_problem(config)


def _source_problem(config: RunConfig) -> str:
    """Problem of the teachers that sources name with other keys; "" if there is none."""
    keys, weights = config.teacher, {reward.name: reward.weight for reward in config.rewards}
    sources = {f"data.sources.{place}.teacher={it.teacher!r}": it for place, it in enumerate(config.data.sources)}
    named = {key: source for key, source in sources.items() if source.teacher is not None}
    if not named:
        return ""
    for other, value in {"url": keys.url, "template": keys.template}.items():
        if value is not None:
            return (
                f"{next(iter(named))} with teacher.{other}={value!r}: the teachers of sources are loaded by the "
                "training, and read what the policy reads; remove one of the two"
            )
    if keys.model is None:
        return (
            f"{next(iter(named))} without teacher.model, the teacher of the sources that name none; set it, and "
            "teacher = '' in each source that no teacher should teach"
        )
    if keys.model not in source_teachers(config).values():
        return (
            f"teacher.model={keys.model!r} teaches no source: each of data.sources names another teacher, or none; "
            "set it to a teacher that a source names, or remove the key teacher from a source"
        )
    for key, source in named.items():
        if source.teacher == "self":
            return f"{key}: a policy that teaches itself is for all sources (teacher.template); name a model, or ''"
        if not source.teacher and not any(weights[name] for name in config.rewards_of(source.name)):
            return (
                f"{key}, and no reward of {source.name!r} has a weight: nothing would be learnt from it; name a "
                "teacher, give a reward a weight, or remove the source"
            )
    return ""


def _template_problem(config: RunConfig) -> str:
    """Problem of what a template shows with other keys; "" if there is none."""
    places, rollout, shown = config.teacher.places, config.rollout, f"teacher.template={config.teacher.template!r}"
    if BETTER in places and rollout.num_generations == 1:
        return (
            f"{shown} with rollout.num_generations=1: {{better}} is another completion of the same group, and there "
            "is none; raise num_generations, or leave the place out"
        )
    if ERROR in places and not config.environment.is_used:
        return (
            f"{shown}: {{error}} is what tools answer when they fail, and there are none; name some in "
            "environment.tools or environment.environment_factory, or leave the place out"
        )
    if places and config.environment.is_used and rollout.engine == "recorded":
        return (
            f"{shown} with rollout.engine='recorded' and an environment or tools: a recording does not keep the "
            "prompts of conversations as messages; remove one of them"
        )
    return ""
