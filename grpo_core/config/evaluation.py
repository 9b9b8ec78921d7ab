"""`[evaluation]`, `[registry]`, `[promotion]` and `[publish]`: how a policy is judged, registered, promoted and
exported."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from grpo_core.config.base import Section
from grpo_core.config.metrics import Deciding

HELD_OUT = "held-out"  # name of the evaluation set that data.eval gives
CHAMPION = "champion"  # alias of the version in use
WARM_START = "warm-start"  # name of the policy that a training began with, if that is not the base
# Beginnings of the keys that outcomes depend on, besides the policy.
EVALUATED_BY = (
    *("evaluation.", "rewards.", "environment.", "data.eval", "data.columns", "data.system_prompt", "data.sources."),
    *("data.subset", "data.revision", "data.schema", "data.checks."),
    *("data.chat_template_kwargs", "rollout.max_completion_length", "rollout.stop"),
)


class EvaluationSet(Section):
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=100)
    """Name of the set in reports, metrics and guards; `held-out` is taken: it is data.eval."""
    data: str
    """Prompts, in any form that data.train may have, with the columns that the rewards read."""
    split: str = "test"
    """Split to take when `data` is a hub name or a saved DatasetDict."""
    subset: str | None = None
    """Subset (configuration) of `data`; only for a hub name."""
    revision: str | None = None
    """Hub revision (branch, tag or commit) of `data`; only for a hub name."""
    source: str | None = None
    """With `data.sources`: the source whose columns, system prompt, rewards, environment and limit apply to these
    prompts."""


class EvaluationConfig(Section):
    accuracy_reward: str | None = None
    """A completion is right if this reward gives it 1; default: the first reward. With `data.sources`: for a source
    that this reward does not score, the first of the source's rewards."""
    sets: list[EvaluationSet] = Field(default_factory=list)
    """More prompts to evaluate on, besides data.eval; none of them may be trained on."""
    category_column: str = "category"
    """Column to group results by: a set that has it is also reported value by value."""
    group_column: str | None = Field(None, min_length=1)
    """Column of data.eval and `sets` in which prompts that belong together have the same value: questions on one
    passage, sums of one template, paraphrases. Groups are then the unit of intervals, tests and decisions instead of
    prompts, and figures are means over groups."""
    num_samples: int = Field(1, ge=1, le=1024)
    """n: completions per prompt; more than one gives pass@k and the majority vote, and needs a temperature above 0."""
    answer_pattern: str | None = None
    """Regular expression that finds a completion's answer for the majority vote: the first group of its last match.
    Default: the whole completion, without the white space around it."""
    max_completion_length: int | None = Field(None, ge=1)
    """Tokens after which a completion is cut off in an evaluation; default: rollout.max_completion_length."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of an evaluation; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling in an evaluation; 1 keeps all tokens."""
    top_k: int = Field(0, ge=0)
    """Sample among this many most likely tokens in an evaluation; 0 keeps all."""
    confidence: float = Field(0.95, gt=0, lt=1)
    """Confidence level of the intervals."""

    @field_validator("answer_pattern")
    @classmethod
    def _has_a_group(cls, pattern: str | None) -> str | None:
        try:
            groups = re.compile(pattern).groups if pattern is not None else 1
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        if not groups:
            raise ValueError("no group in it says what the answer is; put one in parentheses, as in 'answer: (.+)'")
        return pattern

    @model_validator(mode="after")
    def _consistent(self) -> EvaluationConfig:
        names = [HELD_OUT, *(each.name for each in self.sets)]
        if len(set(names)) < len(names):
            raise ValueError(f"evaluation sets {names} share a name; {HELD_OUT!r} is the name of data.eval")
        if self.num_samples > 1 and self.temperature == 0:
            raise ValueError(
                f"num_samples={self.num_samples} with temperature=0 would give the same completion each time; "
                "set a temperature, such as 0.7, or num_samples=1"
            )
        return self


class RegistryConfig(Section):
    """Names in MLflow; what MLflow would refuse after the training is refused before it."""

    experiment: str = Field("grpo", min_length=1, max_length=500)
    """MLflow experiment of the run."""
    model_name: str | None = Field(None, pattern=r"^[^/:]*$", max_length=200)
    """Registered model that gets a new version, without / and : in its name; default: the run's name."""
    alias: str = Field("candidate", pattern=r"^[\w-]+$", max_length=255)
    """Alias of the new version: letters, digits, _ and -. Only a promotion sets `champion`."""
    sweep: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
    """The sweep that this run is an arm of; set by `grpo sweep`. Its MLflow run is nested in the sweep's, it reuses
    what another arm has made, and no promotion judges it on `held-out`, by which the sweep chooses."""
    traces_per_batch: int = Field(4, ge=0, le=1024)
    """Completions per generation batch that MLflow gets as traces, including the worst and the best completion of the
    worst and of the best group; 0 sends none."""
    evaluation_traces: int = Field(100, ge=0, le=100_000)
    """Evaluated prompts per set that MLflow gets as traces, linked to the model version: those that it answers worse
    than the base or the champion first, then those that it answers better. 0 sends none."""
    served_prompts: int = Field(100, ge=0, le=10_000)
    """Held-out prompts that a new version is asked as MLflow asks it, for at most 20 seconds, to compare its answers
    with the evaluation's. 0: none, such as on a machine that cannot hold the model."""

    @field_validator("model_name")
    @classmethod
    def _names_a_model(cls, name: str | None) -> str | None:
        if name is not None and name.strip() in ("", ".", ".."):
            raise ValueError(f"{name!r} cannot be the name of a model; leave it out to use the run's name")
        return name

    @field_validator("alias")
    @classmethod
    def _is_free(cls, alias: str) -> str:
        if alias.lower() == CHAMPION:
            raise ValueError(
                f"{alias!r} is set only by a promotion; register under another alias, such as 'candidate', and set "
                "promotion.automatic=true to try to promote each version"
            )
        if alias.lower() == "latest" or re.fullmatch(r"[vV]\d+", alias):
            raise ValueError(f"{alias!r} is reserved in MLflow, as 'latest' and v1, v2, … are; take another alias")
        return alias


class Guard(Section):
    """A bound that a version must keep to be promoted, whatever it gains elsewhere."""

    set: str = HELD_OUT
    """Evaluation set on which the bound has to hold: `held-out`, one of `evaluation.sets`, or one of `data.sources`,
    whose held-out prompts then count alone."""
    metric: str
    """accuracy, reward, rewards/NAME/mean, completions/mean_length, completions/clipped_ratio, kl (to the base model);
    with tools or an environment conversations/mean_turns, conversations/tool_calls, conversations/failed_tool_calls or
    conversations/failed."""
    max_drop: float | None = Field(None, ge=0)
    """Largest fall of the metric below the champion's: the lower bound of the paired difference must be at least minus
    this."""
    max_rise: float | None = Field(None, ge=0)
    """Largest rise of the metric above the champion's: the upper bound of the paired difference must be at most
    this."""
    min: float | None = None
    """Lowest mean that the metric may have."""
    max: float | None = None
    """Highest mean that the metric may have."""

    @model_validator(mode="after")
    def _bounds_something(self) -> Guard:
        if all(bound is None for bound in (self.max_drop, self.max_rise, self.min, self.max)):
            raise ValueError(f"guard on {self.metric!r} bounds nothing; give max_drop, max_rise, min or max")
        return self


class PromotionConfig(Section):
    set: str = HELD_OUT
    """Evaluation set on which a version has to be better; a source of `data.sources` is one too. If the training
    chooses its model on `held-out` (by load_best_model_at_end or early_stopping_patience), name another set."""
    metric: Deciding | None = None
    """Metric in which a version has to be better, and which reports show first: accuracy (share of right answers) or
    reward (mean weighted reward). Default: accuracy if evaluation.accuracy_reward gave every evaluated completion 0 or
    1, else reward."""
    confidence: float = Field(0.95, gt=0.5, lt=1)
    """1 minus the highest probability that any version that is no better than the same champion is promoted, however
    many are evaluated on the same prompts and whichever are tried."""
    min_gain: float = Field(0.0, ge=0)
    """The least mean gain on these prompts that is worth a promotion; the true gain may be smaller."""
    guards: list[Guard] = Field(default_factory=list)
    """More bounds that have to hold."""
    served_agreement: float = Field(1.0, ge=0, le=1)
    """The least share of `registry.served_prompts` that the version, asked as MLflow asks it, must answer as it did in
    the evaluation. Answers that differ only where two tokens are equally likely, except for rounding, count as
    equal."""
    automatic: bool = False
    """Try to promote the new version at the end of the pipeline."""
    approval: bool = False
    """Ask a person before a version that passes becomes the champion: the flow run is suspended, shows the verdict and
    the samples that changed most, and continues with the person's answer, name and comment. Without Prefect's
    deployments, `grpo promote --approve NAME` answers."""


class PublishConfig(Section):
    """Exports of the registered version, each judged against the trained policy on the run's held-out prompts."""

    formats: list[Literal["huggingface", "bfloat16", "int8", "int4"]] = Field(default_factory=list)
    """What the registered version is exported as, each in a folder of its own under the run: huggingface (the trained
    weights as they are, LoRA merged), bfloat16 (half the size), int8 and int4 (weights of the linear layers, by
    llm-compressor, in the Python that GRPO_QUANTIZE_PYTHON names). Each has a model card. Empty: nothing is
    exported."""
    max_drop: float = Field(0.02, ge=0)
    """Largest fall of the deciding metric below the trained policy's that an export may have: the lower bound of the
    paired difference must be at least minus this. 0.02 of accuracy is 2 points; set it for a reward by its range."""
    hub_repository: str | None = None
    """Repository of the Hugging Face hub, OWNER/NAME, that takes the exports that are shown to keep max_drop; each
    format except the first goes to OWNER/NAME-FORMAT. A repository that does not exist yet is made, private. The
    token is the hub's own: HF_TOKEN, or `hf auth login`."""

    @field_validator("formats", mode="before")
    @classmethod
    def _is_made_here(cls, formats: object) -> object:
        if isinstance(formats, list) and "gguf" in formats:
            raise ValueError(
                "'gguf' is not made here, since such a file is not evaluated; export 'huggingface', and convert that "
                "folder by llama.cpp's convert_hf_to_gguf.py"
            )
        return formats

    @model_validator(mode="after")
    def _exports_something(self) -> PublishConfig:
        if len({*self.formats}) < len(self.formats):
            raise ValueError(f"formats={self.formats} names a format twice; name each once")
        if self.hub_repository and not self.formats:
            raise ValueError(
                f"hub_repository={self.hub_repository!r} without formats: nothing is exported; add formats, such as "
                "['huggingface'], or remove hub_repository"
            )
        return self
