"""A run's configuration: read from TOML, checked as a whole, written back. Its keys are declared in `sections`.

Imports no torch, so that a plan answers at once.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, Field, ValidationError, model_validator

from grpo_core.config.evaluation import GUARDED, HELD_OUT, EvaluationConfig, PromotionConfig, RegistryConfig
from grpo_core.config.inputs import (
    AlgorithmConfig,
    DataConfig,
    HealthConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    Section,
    TrainConfig,
)
from grpo_core.errors import GrpoError
from grpo_core.rewards.modules import search_beside
from grpo_core.rewards.registry import OPERATIONAL

# Which servers sample, not what.
SERVERS = {key for key in RolloutConfig.model_fields if key.startswith("vllm_")}
SHOWN = 200  # characters of a wrong value


class ConfigError(GrpoError):
    """A configuration that breaks a rule; the message names each key, its value, the rule and a way out."""


class RunConfig(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
    """Name of the run and of its directory."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seeds prompt order and sampling."""
    model: ModelConfig
    data: DataConfig
    rewards: list[RewardConfig] = Field(min_length=1)
    """Reward functions; what the policy is trained on is the weighted sum of what they count."""
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig = TrainConfig()
    health: HealthConfig = HealthConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    registry: RegistryConfig = RegistryConfig()
    promotion: PromotionConfig = PromotionConfig()

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        names = [reward.name for reward in self.rewards]
        if len(set(names)) < len(names):
            raise ValueError(f"rewards {names} share a name; give those of the same function a `name` each")
        for place, reward in enumerate(self.rewards):
            if reward.gate not in (None, *names):
                raise ValueError(f"rewards.{place}.gate={reward.gate!r} is not among the rewards {names}")
            if reward.function == "judge":
                _check_json(reward.args, f"rewards.{place}.args.")
        if self.evaluation.accuracy_reward not in (None, *names):
            raise ValueError(
                f"evaluation.accuracy_reward={self.evaluation.accuracy_reward!r} is not among the rewards {names}"
            )
        sets = [HELD_OUT, *(each.name for each in self.evaluation.sets)]
        for key, name in [
            ("promotion.set", self.promotion.set),
            *((f"promotion.guards.{place}.set", guard.set) for place, guard in enumerate(self.promotion.guards)),
        ]:
            if name not in sets:
                raise ValueError(f"{key}={name!r} is not among the evaluation sets {sets}")
        self._check_judging_sets()
        metrics = [*GUARDED, *(f"rewards/{name}/mean" for name in names)]
        for place, guard in enumerate(self.promotion.guards):
            if guard.metric not in metrics:
                raise ValueError(f"promotion.guards.{place}.metric={guard.metric!r} is not among {metrics}")
        if self.model.use_peft and self.algorithm.sync_ref_model:
            raise ValueError(
                "algorithm.sync_ref_model=true with model.use_peft=true: the reference policy is the base model under "
                "the adapter, which does not move; remove one of the two"
            )
        if self.rollout.max_staleness and not self.algorithm.vllm_importance_sampling_correction:
            raise ValueError(
                f"rollout.max_staleness={self.rollout.max_staleness} trains on samples of an earlier policy; "
                "algorithm.vllm_importance_sampling_correction has to be true"
            )
        return self

    def _check_judging_sets(self) -> None:
        """Raises ValueError if a promotion would judge by the prompts on which the training chose its model."""
        chosen_by = {
            "train.load_best_model_at_end": self.train.load_best_model_at_end,
            "train.early_stopping_patience": self.train.early_stopping_patience,
        }
        judged_by = {
            "promotion.set": self.promotion.set,
            **{f"promotion.guards.{place}.set": guard.set for place, guard in enumerate(self.promotion.guards)},
        }
        sources = {HELD_OUT: (self.data.eval, self.data.eval_split)}
        sources |= {each.name: (each.data, each.split) for each in self.evaluation.sets}
        choosing = [f"{key}={json.dumps(value)}" for key, value in chosen_by.items() if value]
        judging = {key: name for key, name in judged_by.items() if sources[name] == sources[HELD_OUT]}
        if choosing and judging:
            named = ", ".join(f"{key}={name!r}" for key, name in judging.items())
            raise ValueError(
                f"{', '.join(choosing)} with {named}: the training chooses its model on "
                "data.eval, which that set is, so it would look better there than it is; add other prompts as a set in "
                f"[[evaluation.sets]] and name it in {', '.join(judging)}, or remove {', '.join(choosing)}"
            )

    def determining(self) -> dict[str, Any]:
        """The values that results follow from: all but those that only watch, rehearse, or say what memory and disk a
        training takes. `held_out`: those of `evaluation` that a training depends on.

        A limit that stopped a training may be changed, and the training goes on from where it was.
        """
        others: Any = {
            "health": True,
            "rewards": {"__all__": {"timeout", "range", "isolated", "memory_gib"}},
            "rollout": {"max_sync_drift", "gpu_memory_utilization", "cpu_kv_cache_gib", *SERVERS},
            "data": {"answer_column"},
            "train": {"save_steps", "save_total_limit", "gradient_checkpointing"},
        }
        values = self.model_dump(mode="json", exclude=others)
        for reward in values["rewards"]:
            left_out = OPERATIONAL.get(reward["function"], ())
            reward["args"] = {name: value for name, value in reward["args"].items() if name not in left_out}
        reported = {"confidence", "sets", "category_column", "num_samples", "answer_pattern"}
        sampled = {key: value for key, value in values["evaluation"].items() if key not in reported}
        return {**values, "held_out": sampled if self.train.eval_steps else None}

    @property
    def accuracy_reward(self) -> str:
        return self.evaluation.accuracy_reward or self.rewards[0].name

    @property
    def evaluation_files(self) -> dict[str, str]:
        """Evaluation set → the data set under dataset/ that holds its validated prompts."""
        return {HELD_OUT: "eval", **{each.name: f"eval-{each.name}" for each in self.evaluation.sets}}

    @property
    def evaluation_length(self) -> int:
        """Tokens after which an evaluated completion is cut off."""
        return self.evaluation.max_completion_length or self.rollout.max_completion_length


def _check_json(values: dict[str, Any], prefix: str) -> None:
    """Raises ValueError for values that TOML has and JSON, in which requests to a judge are sent, does not."""
    for key, value in flatten(values, prefix).items():
        if not isinstance(value, (str, int, float, type(None))) or (isinstance(value, float) and not isfinite(value)):
            raise ValueError(f"{key}={value} cannot be sent as JSON; write dates and times as text, and no inf or nan")


def parse_config(values: dict[str, Any]) -> RunConfig:
    """Validate nested `values`; ConfigError lists every mistake, unknown keys with the nearest known one."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        mistakes = [it for it in error.errors() if it["type"] != "default_factory_not_called"]  # follows from another
        raise ConfigError("\n".join(map(_sentence, mistakes))) from None


def load_config(path: Path | str, overrides: list[str] | None = None) -> RunConfig:
    """Read a TOML file and apply `section.key=value` overrides (values in TOML syntax, bare strings allowed). Makes the
    modules beside the file importable, for its rewards."""
    search_beside(Path(path))
    return parse_config(read_values(path, overrides))


def read_values(path: Path | str, overrides: list[str] | None = None) -> dict[str, Any]:
    """What a TOML file and its overrides say, not yet validated."""
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file (looked in {Path.cwd()})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    for override in overrides or []:
        _override(values, override)
    return values


def read_overrides(overrides: list[str] | None) -> dict[str, Any]:
    """What `section.key=value` overrides say by themselves, not yet validated."""
    values: dict[str, Any] = {}
    for override in overrides or []:
        _override(values, override)
    return values


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as TOML; `parse_config` of it gives the same configuration back."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested values by their keys, such as train.learning_rate or rewards.0.weight."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    flat: dict[str, Any] = {}
    for key, value in items:
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, (dict, list)) else {name: value}
    return flat


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
            yield f"{prefix}{name}", default, accepts, field.get("description", "").replace("\n", " ")

    root = RunConfig.model_json_schema()
    yield from walk(root, "")


def _accepts(form: dict[str, Any]) -> str:
    if "enum" in form:
        return ", ".join(form["enum"])
    return f"{form['type']} {describe_bounds(form)}".strip()


def describe_bounds(form: dict[str, Any]) -> str:
    """The bounds in a JSON schema, such as "> 0 ≤ 1"; empty without any."""
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return " ".join(f"{sign} {form[key]}" for key, sign in signs.items() if key in form)


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
    value = repr(error["input"])
    return f"{key} = {value if len(value) <= SHOWN else value[:SHOWN] + '…'}: {message}"


def _model_at(location: tuple[int | str, ...]) -> type[BaseModel]:
    model: Any = RunConfig
    for part in location:
        if isinstance(part, str):
            annotation = model.model_fields[part].annotation
            (model,) = get_args(annotation) or (annotation,)  # of a list, what it lists
    return model
