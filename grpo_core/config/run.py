"""A run's configuration as a whole, and the rules across its sections."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import Field, model_validator

from grpo_core.config.algorithm import AlgorithmConfig
from grpo_core.config.base import Section
from grpo_core.config.environment import OWN_REWARD, EnvironmentConfig
from grpo_core.config.evaluation import HELD_OUT, EvaluationConfig, PromotionConfig, PublishConfig, RegistryConfig
from grpo_core.config.inputs import CurriculumConfig, DataConfig, ModelConfig, RewardConfig
from grpo_core.config.launch import LaunchConfig, check_placement
from grpo_core.config.metrics import evaluated_metrics, reward_means
from grpo_core.config.rollout import RolloutConfig
from grpo_core.config.teacher import TeacherConfig, teacher_problem
from grpo_core.config.training import BF16_CAPABILITY, HealthConfig, TrainConfig
from grpo_core.config.vllm_args import check_speculation
from grpo_core.config.warm_start import WarmStartConfig, warm_start_problem
from grpo_core.errors import ConfigError
from grpo_core.system.addresses import keys_with_secrets

NAME = "[A-Za-z0-9][A-Za-z0-9._-]*"
DATED_NAME = r"([A-Za-z0-9]|\{date\})([A-Za-z0-9._-]|\{date\})*"  # before the date is filled in
LONGEST_NAME = 200


def is_run_name(name: object) -> bool:
    """True if a run may have this name."""
    return isinstance(name, str) and len(name) <= LONGEST_NAME and re.fullmatch(NAME, name) is not None


class RunConfig(Section):
    name: str = Field(pattern=f"^{NAME}$", max_length=LONGEST_NAME)
    """Name of the run and of its directory. `{date}` in it becomes the day (UTC) on which the run is due: each day has
    a run of its own."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of the order of prompts and of sampling."""
    model: ModelConfig
    data: DataConfig
    rewards: list[RewardConfig] = Field(min_length=1)
    """Reward functions; the policy is trained on the weighted sum of their values, each as clipped, normalized and
    gated."""
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig = TrainConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    teacher: TeacherConfig = TeacherConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    launch: LaunchConfig = LaunchConfig()
    health: HealthConfig = HealthConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    registry: RegistryConfig = RegistryConfig()
    promotion: PromotionConfig = PromotionConfig()
    publish: PublishConfig = PublishConfig()

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if found := [*keys_with_secrets(self.model_dump())]:
            raise ValueError(
                f"{found[0]} is an address with a user, password, token or other parameter, which MLflow, Prefect and "
                "reports would show: leave that out, and let the code that uses it read the secret from the environment"
            )
        names = [reward.name for reward in self.rewards]
        if len(set(names)) < len(names):
            raise ValueError(f"rewards {names} share a name; give those of the same function a `name` each")
        for place, reward in enumerate(self.rewards):
            if reward.gate not in (None, *names):
                raise ValueError(f"rewards.{place}.gate={reward.gate!r} is not among the rewards {names}")
        if self.evaluation.accuracy_reward not in (None, *names):
            raise ValueError(
                f"evaluation.accuracy_reward={self.evaluation.accuracy_reward!r} is not among the rewards {names}"
            )
        self._check_sources()
        sets = [HELD_OUT, *self.evaluated_sources, *(each.name for each in self.evaluation.sets)]
        for key, name in [
            ("promotion.set", self.promotion.set),
            *((f"promotion.guards.{place}.set", guard.set) for place, guard in enumerate(self.promotion.guards)),
        ]:
            if name not in sets:
                raise ValueError(f"{key}={name!r} is not among the evaluation sets {sets}")
        self._check_judging_sets()
        metrics = [*evaluated_metrics(self.environment.is_used), *reward_means(names)]
        for place, guard in enumerate(self.promotion.guards):
            if guard.metric not in metrics:
                raise ValueError(f"promotion.guards.{place}.metric={guard.metric!r} is not among {metrics}")
        if self.model.use_peft and self.algorithm.sync_ref_model:
            raise ValueError(
                "algorithm.sync_ref_model=true with model.use_peft=true: the reference policy is the base model under "
                "the adapter, which does not move; remove one of the two"
            )
        if self.model.lora_modules_to_save and self.train.sharding != "none":
            raise ValueError(
                f"model.lora_modules_to_save={self.model.lora_modules_to_save} with train.sharding="
                f"{self.train.sharding!r}: what is trained beside a sharded base is held whole by each process, which "
                "is meant for small adapters; set train.sharding to 'none', or remove lora_modules_to_save"
            )
        if self.model.load_in_4bit and self.train.sharding != "none":
            raise ValueError(
                f"model.load_in_4bit=true with train.sharding={self.train.sharding!r}: 4-bit weights are packed, with "
                "their scales beside them, and are not sharded here; set one of the two to its default"
            )
        if self.rollout.engine == "recorded" and self.train.eval_steps:
            raise ValueError(
                f"train.eval_steps={self.train.eval_steps} with rollout.engine='recorded': evaluations during training "
                "sample, and no engine is loaded; remove train.eval_steps (the stage evaluate judges the policy)"
            )
        if self.rollout.engine == "recorded" and self.data.curriculum != CurriculumConfig():
            raise ValueError(
                f"data.curriculum.kind={self.data.curriculum.kind!r}, probe={self.data.curriculum.probe} with "
                "rollout.engine='recorded': a training on a recording takes the prompts that were recorded; remove "
                "data.curriculum"
            )
        if self.rollout.repetition_penalty != 1 and not self.algorithm.vllm_importance_sampling_correction:
            raise ValueError(
                f"rollout.repetition_penalty={self.rollout.repetition_penalty:g} samples from another policy than the "
                "trained one; algorithm.vllm_importance_sampling_correction has to be true, which weights the samples, "
                "or the penalty 1"
            )
        if self.train.deterministic and self.rollout.engine not in ("transformers", "recorded"):
            raise ValueError(
                f"train.deterministic=true with rollout.engine={self.rollout.engine!r}: vLLM's kernels give other bits "
                "for other batches, and its mode that avoids this replaces the training's own products too; set "
                "rollout.engine to 'transformers', or train.deterministic to false"
            )
        if self.publish.hub_repository and self.registry.sweep:
            raise ValueError(
                f"publish.hub_repository={self.publish.hub_repository!r} in a sweep: each arm would overwrite the "
                "weights of the others; remove it, and publish the chosen arm by a run of its own"
            )
        check_speculation(self)
        check_placement(self)
        self._check_environment()
        self._check_routing()
        if problem := teacher_problem(self) or warm_start_problem(self):
            raise ValueError(problem)
        if self.rollout.max_staleness and not self.algorithm.vllm_importance_sampling_correction:
            raise ValueError(
                f"rollout.max_staleness={self.rollout.max_staleness} trains on samples of an earlier policy; "
                "algorithm.vllm_importance_sampling_correction has to be true"
            )
        if self.health.lowering and not self.rollout.max_staleness:
            raise ValueError(
                f"health.{self.health.lowering[0]}='lower_staleness' with rollout.max_staleness=0: nothing is sampled "
                "ahead that could be lowered; set max_staleness, or the action to 'warn', 'stop' or 'roll_back'"
            )
        return self

    def _check_sources(self) -> None:
        """Raises ValueError if other sections do not fit the sources, or need sources and there are none."""
        names, scored = self.evaluated_sources, {it.name: self.rewards_of(it.name) for it in self.data.sources}
        for place, source in enumerate(self.data.sources):
            key = f"data.sources.{place}"
            for name in source.rewards or ():
                if name not in (rewards := [reward.name for reward in self.rewards]):
                    raise ValueError(f"{key}.rewards names {name!r}, which is not among the rewards {rewards}")
            factories = self.environment.environment_factory
            known = [*factories] if isinstance(factories, dict) else []
            if source.environment is not None and source.environment not in known:
                raise ValueError(
                    f"{key}.environment={source.environment!r} is not among the names in environment."
                    f"environment_factory: {known or 'there are none'}"
                )
            if (limit := source.max_completion_length) and limit > self.rollout.max_completion_length:
                raise ValueError(
                    f"{key}.max_completion_length={limit} is more than rollout.max_completion_length="
                    f"{self.rollout.max_completion_length}, the limit of all sources; raise that, or lower this"
                )
        for place, reward in enumerate(self.rewards):
            at = f"rewards.{place} ({reward.name!r})"
            where = [source for source, rewards in scored.items() if reward.name in rewards]
            if scored and not where:
                raise ValueError(f"{at} scores no source; name it in the rewards of one of data.sources, or remove it")
            for source in where:
                if reward.gate and reward.gate not in scored[source]:
                    raise ValueError(
                        f"{at} scores the source {source!r}, its gate {reward.gate!r} does not, so that it would count "
                        f"as 0 there; add {reward.gate!r} to that source's rewards, or list the reward twice"
                    )
        for place, each in enumerate(self.evaluation.sets):
            key = f"evaluation.sets.{place}"
            if each.name in names:
                raise ValueError(f"{key}.name={each.name!r} is the name of a source; take another one")
            if (names or each.source) and each.source not in names:
                there = f"name one of {names}" if names else "there are no data.sources; remove it"
                raise ValueError(f"{key}.source={each.source!r}: {there}")
        if HELD_OUT in names:
            raise ValueError(f"data.sources: {HELD_OUT!r} names the held-out prompts of all sources; take another name")
        like = {each.name: each.source for each in self.evaluation.sets}
        by = {it.name: [source for source in names if it.name in scored[source]] for it in self.rewards}
        for place, guard in enumerate(self.promotion.guards):
            asked = names if guard.set == HELD_OUT else [like.get(guard.set, guard.set)]
            reward = guard.metric.removeprefix("rewards/").removesuffix("/mean")
            if guard.metric.startswith("rewards/") and names and not {*asked} <= {*by.get(reward, asked)}:
                raise ValueError(
                    f"promotion.guards.{place}.metric={guard.metric!r} does not score all prompts of {guard.set!r}; it "
                    f"scores the sources {by[reward]}: name one of them as the guard's set"
                )

    def _check_environment(self) -> None:
        """Raises ValueError if other keys cannot be combined with conversations with tools or an environment."""
        own = [reward.name for reward in self.rewards if reward.function == OWN_REWARD]
        if own and not self.environment.factories:
            raise ValueError(
                f"rewards: {own[0]!r} is the environment's own reward, and there is none; name a class in "
                "environment.environment_factory"
            )
        if not self.environment.is_used:
            return
        if self.rollout.stop:
            raise ValueError(
                f"rollout.stop={self.rollout.stop} with an environment or tools: a turn ends where the chat template "
                "ends it; remove it"
            )
        if self.rollout.may_share_processes and self.rollout.vllm_tensor_parallel_size > 1:
            raise ValueError(
                f"rollout.vllm_tensor_parallel_size={self.rollout.vllm_tensor_parallel_size} with an environment or "
                "tools: processes that sample together take no turns on the way; set rollout.engine to 'vllm-server'"
            )

    def _check_routing(self) -> None:
        """Raises ValueError if other keys cannot be combined with what reads the routers of a mixture of experts."""
        reading = [f"algorithm.{key}={json.dumps(getattr(self.algorithm, key))}" for key in self.algorithm.router_keys]
        if reading and self.train.torch_compile:
            raise ValueError(
                f"{' and '.join(reading)} with train.torch_compile=true: routers are not read in compiled layers; set "
                "train.torch_compile to false"
            )
        elsewhere = {"rollout.engine='vllm-server'": self.rollout.engine == "vllm-server"}
        for what, applies in {**elsewhere, "an environment or tools": self.environment.is_used}.items():
            if self.algorithm.routing_replay and applies:
                raise ValueError(
                    f"algorithm.routing_replay=true with {what}: the experts that are taken there are not kept; set it "
                    "to false, or sample with rollout.engine='transformers' or 'vllm' and without environment and tools"
                )

    def _check_judging_sets(self) -> None:
        """Raises ValueError if a promotion would judge by the prompts on which the training chooses its model."""
        chosen_by = {
            "train.load_best_model_at_end": self.train.load_best_model_at_end,
            "train.early_stopping_patience": self.train.early_stopping_patience,
        }
        judged_by = {
            "promotion.set": self.promotion.set,
            **{f"promotion.guards.{place}.set": guard.set for place, guard in enumerate(self.promotion.guards)},
        }
        held_out = {(each.eval, each.eval_split) for each in self.data.origins.values()}
        others = {each.name for each in self.evaluation.sets if (each.data, each.split) not in held_out}
        choosing = [f"{key}={json.dumps(value)}" for key, value in chosen_by.items() if value]
        judging = {key: name for key, name in judged_by.items() if name not in others}
        if choosing and judging:
            named = ", ".join(f"{key}={name!r}" for key, name in judging.items())
            raise ValueError(
                f"{', '.join(choosing)} with {named}: the training chooses its model on "
                "data.eval, which is that set, so the model would look better there than it is; add other prompts as a "
                f"set in [[evaluation.sets]] and name it in {', '.join(judging)}, or remove {', '.join(choosing)}"
            )

    @property
    def servers_in_job(self) -> int:
        """Further machines of a scheduler's job, each of which runs a vLLM server."""
        in_job = self.launch.launcher in ("kubernetes", "slurm") and not self.launch.server_hosts
        return self.rollout.vllm_num_servers if in_job and self.rollout.starts_servers else 0

    @property
    def servers_elsewhere(self) -> bool:
        """True if the vLLM servers that a training starts are on machines of their own."""
        return bool(self.launch.server_hosts or self.servers_in_job)

    @property
    def num_machines(self) -> int:
        """Machines that a launcher gives: the training's first, then those of the vLLM servers in its job."""
        return self.train.num_machines + self.servers_in_job

    @property
    def where_evaluated(self) -> RunConfig:
        """The same for the stage evaluate: in as many processes if the model is sharded, since it may not fit on one
        GPU, otherwise in one."""
        if self.train.sharding != "none":
            return self
        return self.model_copy(update={"train": self.train.model_copy(update={"num_processes": 1, "num_machines": 1})})

    def with_precision(self, capability: tuple[int, int] | None) -> RunConfig:
        """The configuration with the precision that `auto` means on a GPU of this compute capability, or on a CPU if
        it is None. This is decided here alone."""
        if self.train.mixed_precision != "auto":
            return self
        precision = "bf16" if capability is not None and capability >= BF16_CAPABILITY else "no"
        return self.model_copy(update={"train": self.train.model_copy(update={"mixed_precision": precision})})

    def check_replay(self, has_gpu: bool) -> None:
        """Raises ConfigError for routing replay with vLLM on a CPU."""
        if self.algorithm.routing_replay and self.rollout.engine == "vllm" and not has_gpu:
            raise ConfigError(
                "algorithm.routing_replay=true with vLLM on a CPU, where it does not say which experts it took: set "
                "rollout.engine to 'transformers'"
            )

    @property
    def gpu_notes(self) -> list[str]:
        """Sentences on what may surprise about this configuration on a GPU."""
        found, engine = [self._repetition] * self.train.deterministic, self.rollout.engine_on(has_gpu=True)
        if self.train.mixed_precision == "no" and engine != "transformers":
            found.append(
                "train.mixed_precision is 'no', with vLLM on a GPU: its fast attention kernels take no float32, and "
                "the one that does multiplies in TF32, so sampling is slow and its log-probabilities are off by more "
                "than float32's rounding; set train.mixed_precision to 'bf16' on a GPU of compute capability 8.0 or "
                "higher, or rollout.engine to 'transformers'"
            )
        if self.train.sharding != "none" and engine == "transformers":
            found.append(
                f"train.sharding is {self.train.sharding!r}, with rollout.engine = 'transformers': each process also "
                "holds a whole copy of the model to sample with, which is what sharding avoids; set rollout.engine to "
                "'vllm'"
            )
        return found

    @property
    def _repetition(self) -> str:
        """Sentence on what train.deterministic costs on a GPU, and what it cannot repeat in this configuration."""
        beyond = {
            "several processes (NCCL's sums)": self.train.num_processes > 1,
            "tools and environments (answers join when they come)": self.environment.is_used,
            "4-bit weights (kernels of bitsandbytes)": self.model.load_in_4bit,
            "evaluations by vLLM": self.rollout.engine == "recorded",
        }
        named = ", ".join(what for what, applies in beyond.items() if applies)
        return (
            "train.deterministic is true: a training on the same kind of GPU is repeated bit for bit, unless memory "
            "runs out; it takes longer, by about an eighth in a small training on one H200"
            + f"; not promised for {named}"
            * bool(named)
        )

    def rewards_of(self, source: str | None) -> list[str]:
        """Names of the rewards that score a source; of all rewards if it is None."""
        chosen = {each.name: each.rewards for each in self.data.sources}.get(source or "")
        return [reward.name for reward in self.rewards if chosen is None or reward.name in chosen]

    @property
    def source_rules(self) -> list[list[Any]]:
        """Name, rewards and limit of each of `data.sources`: completions and their values depend on these."""
        return [[it.name, self.rewards_of(it.name), it.max_completion_length] for it in self.data.sources]

    @property
    def accuracy_reward(self) -> str | dict[str, str]:
        """Name of the reward that says which completions are right; with several sources, that of each."""
        given = self.evaluation.accuracy_reward or self.rewards[0].name
        own = {each.name: self.rewards_of(each.name) for each in self.data.sources}
        return {source: given if given in rewards else rewards[0] for source, rewards in own.items()} or given

    @property
    def accuracy_rewards(self) -> list[str]:
        """Names of all rewards that say which completions are right."""
        given = self.accuracy_reward
        return [given] if isinstance(given, str) else [*dict.fromkeys(given.values())]

    @property
    def evaluated_sources(self) -> list[str]:
        """Names of the sources; their held-out prompts are evaluated together, and also reported per source."""
        return [each.name for each in self.data.sources]

    @property
    def evaluation_files(self) -> dict[str, str]:
        """Evaluation set → the data set under dataset/ that holds its validated prompts."""
        return {HELD_OUT: "eval", **{each.name: f"eval-{each.name}" for each in self.evaluation.sets}}

    @property
    def evaluation_length(self) -> int:
        """Tokens after which an evaluated completion is cut off."""
        return self.evaluation.max_completion_length or self.rollout.max_completion_length
