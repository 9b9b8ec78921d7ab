"""Every knob of a run, declared once: the TOML schema, the flow's form and the training process's input.

Keys that mean the same as in TRL's GRPOConfig carry TRL's names. Imports no torch, so that a plan answers at once.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class ConfigError(ValueError):
    """A configuration that breaks a rule; the message names each key, its value, the rule and a way out."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class ModelConfig(Section):
    name_or_path: str
    """Hugging Face model folder or hub name of the base model."""
    revision: str | None = None
    """Hub revision (branch, tag or commit); only for hub names."""


class DataConfig(Section):
    train: str
    """Training prompts: a .parquet, .jsonl, .json or .csv file, a dataset saved to disk, or a hub name."""
    eval: str
    """Held-out prompts, in any of the same forms; they must not appear in `train`."""
    train_split: str = "train"
    """Split to take when `train` is a hub name or a saved DatasetDict."""
    eval_split: str = "test"
    """Split to take when `eval` is a hub name or a saved DatasetDict."""


class RewardConfig(Section):
    function: str
    """A built-in reward's name, or `package.module:function` with TRL's signature."""
    weight: float = 1.0
    """Factor of this reward in the sum."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments given to the function at each call."""

    @model_validator(mode="after")
    def _args_can_be_written_as_toml(self) -> RewardConfig:
        missing = [key for key, value in self.args.items() if value is None]
        if missing:
            raise ValueError(f"args.{missing[0]} is null; leave it out to have the function's default")
        return self

    @property
    def name(self) -> str:
        """Name in metrics and reports: the function's own name."""
        return self.function.rsplit(":", 1)[-1]


class RolloutConfig(Section):
    engine: Literal["auto", "vllm", "transformers"] = "auto"
    """What samples completions; `auto` takes vLLM on a GPU and transformers on a CPU."""
    num_generations: int = Field(8, ge=2)
    """G: completions sampled for each prompt."""
    max_completion_length: int = Field(256, ge=1)
    """Tokens after which a completion is cut off."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; log-probabilities in training are scaled by it too."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: the smallest set of tokens with at least this probability; 1 keeps all."""
    top_k: int = Field(0, ge=0)
    """Sample among this many most likely tokens; 0 keeps all."""
    gpu_memory_utilization: float = Field(0.3, gt=0, le=1)
    """Share of the GPU's memory that vLLM takes for its weights and KV cache."""
    cpu_kv_cache_gib: int = Field(1, ge=1)
    """vLLM's KV cache when it runs on a CPU, in GiB."""


class TrainConfig(Section):
    num_processes: int = Field(1, ge=1)
    """Training processes (one per GPU) started by `accelerate launch`."""
    mixed_precision: Literal["no", "bf16"] = "no"
    """`bf16` runs forward and backward under autocast; weights and optimizer stay float32."""
    per_device_train_batch_size: int = Field(8, ge=1)
    """Completions per process and micro-step."""
    gradient_accumulation_steps: int = Field(1, ge=1)
    """Micro-steps per optimizer update."""
    steps_per_generation: int | None = Field(None, ge=1)
    """Micro-steps that one generation batch feeds; default: gradient_accumulation_steps."""
    generation_batch_size: int | None = Field(None, ge=1)
    """Completions sampled at once over all processes; give this or steps_per_generation, not both."""
    num_iterations: int = Field(1, ge=1)
    """Passes over each generation batch (mu in the GRPO paper)."""
    num_train_epochs: float = Field(1.0, gt=0)
    """Passes over the prompts; may be fractional."""
    max_steps: int | None = Field(None, ge=1)
    """Optimizer updates; overrides num_train_epochs."""
    learning_rate: float = Field(1e-6, gt=0)
    """AdamW's peak learning rate."""
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    """Course of the learning rate after warm-up."""
    warmup_steps: float = Field(0, ge=0)
    """Updates of linear warm-up; a value below 1 is a share of max_steps."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay (biases and norms excluded)."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's first-moment decay."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """AdamW's second-moment decay."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    loss_type: Literal["dapo", "grpo", "dr_grpo", "bnpo"] = "dapo"
    """How per-token losses are averaged; see docs/algorithm.md."""
    beta: float = Field(0.0, ge=0)
    """Weight of the KL to the base model; 0 loads no reference model."""
    use_bias_correction_kl: bool = True
    """Multiply the KL estimate by the importance ratio, so that its gradient is unbiased off-policy."""
    epsilon: float = Field(0.2, ge=0)
    """Lower clipping bound of the ratio: 1 - epsilon."""
    epsilon_high: float | None = Field(None, ge=0)
    """Upper clipping bound is 1 + epsilon_high; default: epsilon. DAPO recommends 0.28."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """One ratio per token (GRPO) or one per completion, the geometric mean of its tokens' (GSPO)."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the group's standard deviation, the batch's, or not at all (Dr. GRPO)."""
    mask_truncated_completions: bool = False
    """Leave completions that hit max_completion_length out of the loss (DAPO)."""
    save_steps: int = Field(100, ge=1)
    """A checkpoint every this many updates."""
    save_total_limit: int = Field(2, ge=1)
    """Checkpoints kept, newest first."""

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if self.steps_per_generation is not None and self.generation_batch_size is not None:
            raise ValueError(
                f"steps_per_generation={self.steps_per_generation} and generation_batch_size="
                f"{self.generation_batch_size} are both given; each follows from the other: remove one"
            )
        if self.lr_scheduler_type == "constant" and self.warmup_steps > 0:
            raise ValueError(
                f"lr_scheduler_type='constant' ignores warmup_steps={self.warmup_steps:g}; "
                "use 'constant_with_warmup' or remove warmup_steps"
            )
        return self


class EvaluationConfig(Section):
    accuracy_reward: str | None = None
    """Reward whose value of 1 counts as a right answer; default: the first reward."""
    max_completion_length: int | None = Field(None, ge=1)
    """Tokens after which an evaluated completion is cut off; default: the rollout's."""
    bootstrap_resamples: int = Field(10_000, ge=100)
    """Resamples of the prompts for the paired interval."""
    confidence: float = Field(0.95, gt=0, lt=1)
    """Coverage of the interval."""


class RegistryConfig(Section):
    experiment: str = "grpo"
    """MLflow experiment of the run."""
    model_name: str | None = None
    """Registered model that gets a new version; default: the run's name."""
    alias: str = "candidate"
    """Alias set on the new version."""


class RunConfig(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run and of its directory."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seeds prompt order and sampling."""
    model: ModelConfig
    data: DataConfig
    rewards: list[RewardConfig] = Field(min_length=1)
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    registry: RegistryConfig = RegistryConfig()

    @model_validator(mode="after")
    def _rewards_are_told_apart(self) -> RunConfig:
        names = [reward.name for reward in self.rewards]
        if len(set(names)) < len(names):
            raise ValueError(f"rewards {names} share a name; each reward may be listed once")
        if self.evaluation.accuracy_reward not in (None, *names):
            raise ValueError(
                f"evaluation.accuracy_reward={self.evaluation.accuracy_reward!r} is not among the rewards {names}"
            )
        return self

    @property
    def accuracy_reward(self) -> str:
        return self.evaluation.accuracy_reward or self.rewards[0].name


def parse_config(values: dict[str, Any]) -> RunConfig:
    """Validate nested `values`; ConfigError lists every mistake, unknown keys with the nearest known one."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentence(e) for e in error.errors())) from None


def load_config(path: Path | str, overrides: list[str] | None = None) -> RunConfig:
    """Read a TOML file and apply `section.key=value` overrides (values in TOML syntax, bare strings allowed)."""
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    for override in overrides or []:
        _override(values, override)
    return parse_config(values)


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as TOML; `parse_config` of it gives the same configuration back."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def describe_keys() -> Iterator[tuple[str, str, str, str]]:
    """Every key with its default, what it accepts, and its meaning, in the order of the models."""

    def walk(schema: dict[str, Any], prefix: str) -> Iterator[tuple[str, str, str, str]]:
        for name, field in schema["properties"].items():
            nested = field.get("items", field).get("$ref", "").rsplit("/", 1)[-1]
            if nested:
                yield from walk(root["$defs"][nested], f"{prefix}{name}.")
                continue
            default = "required" if name in schema.get("required", ()) else _toml(field.get("default"))
            forms = field.get("anyOf", [field])
            accepts = " or ".join(_accepts(form) for form in forms if form.get("type") != "null")
            yield f"{prefix}{name}", default, accepts, field.get("description", "")

    root = RunConfig.model_json_schema()
    yield from walk(root, "")


def _accepts(form: dict[str, Any]) -> str:
    if "enum" in form:
        return ", ".join(form["enum"])
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {form[key]}" for key, sign in signs.items() if key in form]
    return " ".join([form["type"], *bounds])


def _toml(default: Any) -> str:
    return "" if default is None else json.dumps(default)


def _override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator:
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, last = key.strip().split(".")
    node: Any = values
    try:
        for part in sections:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        node[last] = value
    except (AttributeError, IndexError, TypeError, ValueError):
        raise ConfigError(f"override {override!r}: the configuration has no place called {key.strip()!r}") from None


def _sentence(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        section, name = _model_at(error["loc"][:-1]), str(error["loc"][-1])
        near = difflib.get_close_matches(name, section.model_fields, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(section.model_fields)}"
        return f"{key}: unknown key; {hint}"
    if error["type"] == "missing":
        return f"{key}: missing; it has no default"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{key}: {message}" if key else message
    return f"{key} = {error['input']!r}: {message}"


def _model_at(location: tuple[int | str, ...]) -> type[BaseModel]:
    model: Any = RunConfig
    for part in location:
        if isinstance(part, str):
            annotation = model.model_fields[part].annotation
            model = RewardConfig if part == "rewards" else annotation
    return model
