"""Everything a stage's output can depend on, in named parts: configuration keys with their values, hashes of contents
and of sources. The table of stages says which parts each stage depends on.

Inputs are identified by their content: a stage is not run again for the same file under another name or in another
folder.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

from grpo_core import run_files
from grpo_core.config.base import flatten
from grpo_core.config.run import RunConfig
from grpo_core.config.warm_start import supervised
from grpo_core.data import own_code
from grpo_core.fingerprint import (
    BEHAVIOUR,
    DIVISION,
    content_hash,
    determining,
    environment_parts,
    reward_parts,
    teacher_parts,
    warm_start_parts,
)
from tasks.stages.run_directory import read_former_config

# Keys that determine how completions are sampled.
SAMPLING = tuple(
    f"rollout.{key}"
    for key in ("max_completion_length", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")
)
LIMITS = {"timeout", "range", "isolated", "memory_gib"}  # keys of a reward that only the rehearsal reads
WATCHING = ("registry.traces_per_batch",)  # keys on which no version depends
Named = dict[str, Any]  # values that outputs depend on, by names for people


class Parts:
    """The parts of one configuration, each computed on first use."""

    def __init__(self, config: RunConfig):
        self.config = config

    def section(self, name: str) -> Named:
        """Keys of a section of the configuration that results depend on."""
        return flatten({name: self._determining[name]})

    @cached_property
    def prompts(self) -> Named:
        """The validated prompts: data, base model (its tokenizer measures them), rewards (they read columns)."""
        config = self.config
        return {
            "behaviour of grpo_core": BEHAVIOUR,
            **self.section("data"),
            **{f"source of {name}": source for name, source in own_code.sources(config.data).items()},
            **{
                f"{key}.{name}": content_hash(getattr(origin, name))
                for key, origin in config.data.origins.items()
                for name in ("train", "eval")
            },
            **self._base_model,
            **self._rewards,
            **self._environment,
            "rollout.max_completion_length": config.rollout.max_completion_length,
        }

    @cached_property
    def reward_limits(self) -> Named:
        """Keys of the rewards that only the rehearsal reads."""
        return {
            f"rewards.{place}.{key}": value
            for place, reward in enumerate(self.config.rewards)
            for key, value in reward.model_dump(include=LIMITS, exclude_defaults=True).items()
        }

    @cached_property
    def environment_limits(self) -> Named:
        """Keys of the environment that only the rehearsal reads."""
        limits = self.config.environment.model_dump(include={"tool_timeout", "memory_gib"}, exclude_defaults=True)
        return flatten({"environment": limits}) if self.config.environment.is_used else {}

    @cached_property
    def evaluated_length(self) -> Named:
        return {"evaluation.max_completion_length": self.config.evaluation_length}

    @cached_property
    def evaluation_sets(self) -> Named:
        sets, column = self.config.evaluation.sets, self.config.evaluation.group_column
        return ({"evaluation.group_column": column} if column else {}) | {
            f"evaluation.sets {each.name}": [
                *(each.split, each.subset, each.revision, content_hash(each.data)),
                *([each.source] if each.source else []),
            ]
            for each in sets
        }

    @cached_property
    def curriculum(self) -> Named:
        """Keys of the curriculum: how prompts are selected, and whether their pass rates are known before; empty by
        default."""
        keys = self.config.data.curriculum.model_dump(mode="json", exclude_defaults=True)
        return flatten({"data": {"curriculum": keys}})

    @cached_property
    def probe(self) -> Named:
        """Everything except prompts and model that the base model's pass rates depend on."""
        sampling = {name: value for name, value in self.section("rollout").items() if name.startswith(SAMPLING)}
        asked = {"seed": self.config.seed, "data.curriculum.probe": self.config.data.curriculum.probe}
        return sampling | asked | self._passing

    @cached_property
    def steps(self) -> Named:
        """Everything that the plan's numbers depend on."""
        return self.prompts | self.section("rollout") | self.section("train")

    @cached_property
    def order(self) -> Named:
        """The seed, on which the counts of several sources depend: it decides which last prompts an epoch drops."""
        return {"seed": self.config.seed} if self.config.data.sources else {}

    @cached_property
    def model(self) -> Named:
        settings = self.section("model") | self._base_model
        for key in ("model.name_or_path", "model.adapter"):  # their content counts, not their name
            settings.pop(key, None)
        if adapter := self.config.model.adapter:
            settings["content of the adapter"] = content_hash(adapter)
        return settings

    @cached_property
    def memory(self) -> Named:
        """Keys that only the plan reads: those of memory and routers, and those that divide a batch."""
        algorithm = {"beta", "router_aux_loss_coef", "routing_replay"}
        read = {"algorithm": algorithm, "train": {*DIVISION, "gradient_checkpointing", "offload"}}
        return flatten(self.config.model_dump(mode="json", include=read, exclude_defaults=True)) | self.teacher

    @cached_property
    def teacher(self) -> Named:
        return flatten({"teacher": teacher_parts(self.config)})

    @cached_property
    def shown(self) -> Named:
        """The template, whose columns are checked and whose prompts are measured, for the policy if it reads them;
        empty without one."""
        teacher = self.config.teacher
        reads = {"the policy reads teacher.template": True} if teacher.is_policy else {}
        return {} if teacher.template is None else {"teacher.template": teacher.template, **reads}

    @cached_property
    def demonstrations(self) -> Named:
        """What validate's demonstrations depend on besides model and tools; empty if it writes none."""
        keys = self.config.warm_start
        if keys.source is None:
            return {}
        return {
            "content of the demonstrations": _shown_content(keys.source),
            "warm_start.split": keys.split,
            "warm_start.revision": keys.revision,
            "rollout.stop": self.config.rollout.stop,
        }

    @cached_property
    def warm_start(self) -> Named:
        """The demonstrations, and the keys of the training on them; empty without one."""
        keys = flatten({"warm_start": warm_start_parts(self.config)})
        shown = self.prompts | self.probe if self.config.warm_start.from_probe else self.demonstrations
        return shown | {name: value for name, value in keys.items() if name not in shown}

    @cached_property
    def supervised(self) -> Named:
        """Everything that the model after the warm start depends on."""
        own = Parts(supervised(self.config, 1))
        training = own.section("train") | own.section("algorithm") | own.model
        return {"behaviour of grpo_core": BEHAVIOUR, "seed": self.config.seed, **training, **self.warm_start}

    @cached_property
    def policy(self) -> Named:
        """The trained policy."""
        held_out = flatten({"evaluation": self._determining["held_out"] or {}})
        evaluations = {f"{name} (while training)": value for name, value in held_out.items()}
        # With kind 'none', a training takes all prompts alike and reads no pass rates.
        taken = {} if self.config.data.curriculum.kind == "none" else self.curriculum | self._passing
        taken |= {"seed": self.config.seed} | self.teacher | self.warm_start
        return self.steps | taken | self.model | self.section("algorithm") | evaluations

    @cached_property
    def evaluation(self) -> Named:
        """Settings and prompts of the policy's evaluation."""
        keys = {
            key: value for key, value in self.section("evaluation").items() if not key.startswith("evaluation.sets.")
        }
        return keys | self.evaluation_sets

    @cached_property
    def base_answers(self) -> Named:
        """Everything that the base model's answers to the evaluated prompts depend on."""
        config = self.config
        sampled = config.evaluation.temperature > 0 or config.environment.is_used
        return {
            **self.prompts,
            **self.evaluated_length,
            **self.evaluation,
            **{key: self.model.get(key) for key in ("model.load_in_4bit", "content of the adapter")},
            **{f"train.{key}": getattr(config.train, key) for key in ("mixed_precision", "sharding")},
            "rollout.engine": config.rollout.in_evaluation.engine,
            "rollout.stop": config.rollout.stop,
            "seed": config.seed if sampled else None,
        }

    @cached_property
    def registration(self) -> Named:
        # Included because a version is judged by the rules recorded with it.
        rules = self.config.promotion.model_dump(mode="json", exclude={"automatic"}, exclude_defaults=True)
        names = {key: value for key, value in self.section("registry").items() if key not in WATCHING}
        return names | {"name": self.config.name} | flatten({"promotion": rules})

    @cached_property
    def _passing(self) -> Named:
        """Keys that decide how far a completion passes; empty without a curriculum."""
        return self.right if self.curriculum else {}

    @cached_property
    def right(self) -> Named:
        """Keys that decide how far a completion passes."""
        ranges = {f"rewards.{place}.range": reward.range for place, reward in enumerate(self.config.rewards)}
        return {"accuracy reward": self.config.accuracy_reward, **ranges}

    @cached_property
    def _determining(self) -> dict[str, Any]:
        return determining(self.config)

    @cached_property
    def _base_model(self) -> Named:
        model = self.config.model
        return {"content of the base model": content_hash(model.name_or_path), "model.revision": model.revision}

    @cached_property
    def _environment(self) -> Named:
        """The keys of the environment, and the hash of the source of each class and tool."""
        keys = environment_parts(self.config)
        sources = {f"source of {name} (environment)": source for name, source in keys.pop("sources", {}).items()}
        return flatten({"environment": keys}) | sources

    @cached_property
    def _rewards(self) -> Named:
        """Each reward's keys, its arguments one by one, and the hash of its source."""
        found: Named = {}
        for place, reward in enumerate(reward_parts(self.config)):
            name, args = f"rewards.{place}", reward.pop("args", {})
            found |= {f"source of {name} ({reward['function']})": reward.pop("source")}
            found |= {f"{name}.{key}": value for key, value in reward.items()}
            found |= {f"{name}.args.{key}": value for key, value in args.items()}
        return found


def _shown_content(source: str) -> str:
    """Hash of demonstrations; of a run, of its training's completions and of what decides which of them are right."""
    if not run_files.is_run(source):
        return content_hash(source)
    completions = content_hash(str(Path(source, run_files.TRAINING, run_files.COMPLETIONS)))
    return hash_values(completions, Parts(read_former_config(Path(source))).right)


def hash_values(*values: Any) -> str:
    """Hash of values that JSON can represent."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()
