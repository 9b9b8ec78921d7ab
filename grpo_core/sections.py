"""The sections of a run's configuration: every knob, declared once, with its meaning and bounds.

Keys that mean the same as in TRL's GRPOConfig carry TRL's names.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

VLLM_MIN_TEMPERATURE = 0.01  # vLLM raises a lower one to this
LONGEST_ARGUMENT = 200  # MLflow takes names of parameters up to 250 characters, rewards.0.args. included
WIDEST_RANGE = 1e12  # of a reward


MOST = 2**31 - 1  # of anything that is counted
HIGHEST_ENTROPY = 100.0  # nats: more than ln of any vocabulary

Bounds = Annotated[tuple[float, float], Field(strict=False)]  # a list in TOML


class Section(BaseModel):
    """Numbers are numbers: neither text such as "1e9" nor true is taken for one."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, strict=True, use_attribute_docstrings=True
    )

    @field_validator("*")
    @classmethod
    def _is_countable(cls, value: Any) -> Any:
        if type(value) is int and value > MOST:
            raise ValueError(f"{value} is beyond {MOST:,}, the most of anything that is counted")
        return value


class ModelConfig(Section):
    name_or_path: str
    """Hugging Face model folder or hub name of the base model."""
    revision: str | None = None
    """Hub revision (branch, tag or commit); only for hub names."""
    use_peft: bool = False
    """Train a LoRA adapter (arXiv:2106.09685) and leave the base model as it is."""
    lora_r: int = Field(16, ge=1)
    """Rank of the adapter."""
    lora_alpha: int = Field(32, ge=1)
    """The adapter's change is scaled by lora_alpha / lora_r."""
    lora_target_modules: list[str] | None = Field(None, min_length=1)
    """Names of the linear layers that get an adapter; default: all but the head, as peft's `all-linear` finds them (of
    mixtures of experts not everywhere experts and router)."""


Severity = Literal["error", "drop", "warn"]
Refusal = Literal["error", "drop"]  # of what no model can be trained on


class DataChecks(Section):
    """What becomes of a row that breaks a rule: `error` refuses the data, `drop` leaves the row out and keeps it in
    dataset/NAME.dropped.parquet, `warn` trains on it and says so."""

    blank_prompt: Refusal = "error"
    """A prompt that is missing, empty or only white space."""
    malformed_conversation: Refusal = "error"
    """Messages of another role than system, user, assistant or without text, a system message that is not the first, a
    last one that is not the user's."""
    chat_template: Refusal = "error"
    """A conversation that the model's chat template refuses, for its roles or their order."""
    no_tokens: Refusal = "error"
    """A prompt, or a last message, of which the tokenizer makes no token: its vocabulary has none of the characters."""
    missing_value: Severity = "error"
    """A null or blank in a column that a reward reads."""
    long_prompt: Refusal = "error"
    """A prompt that, with the chat template and a completion of full length, exceeds the model's context; with RoPE of
    type dynamic or longrope, the length up to which its frequencies stay the same."""
    duplicate_prompt: Severity = "warn"
    """A prompt that came before in the same data; `drop` keeps the first."""
    overlap: Severity = "error"
    """A training prompt that is also held out; `drop` leaves the held-out data whole. Of `evaluation.sets`, a prompt
    that is trained on; `drop` leaves the training data whole."""
    near_overlap: Severity = "error"
    """The same but for upper and lower case and white space."""
    encoding: Severity = "warn"
    """Text that was decoded wrongly: replacement characters, control characters, UTF-8 read as Latin-1."""


class DataConfig(Section):
    train: str
    """Training prompts: a .parquet, .jsonl, .json or .csv file, a dataset saved to disk, or a hub name."""
    eval: str
    """Held-out prompts, in any of the same forms; they must not appear in `train`."""
    train_split: str = "train"
    """Split to take when `train` is a hub name or a saved DatasetDict."""
    eval_split: str = "test"
    """Split to take when `eval` is a hub name or a saved DatasetDict."""
    prompt_column: str = "prompt"
    """Column with the prompts, in `train`, `eval` and `evaluation.sets` alike; rewards get it as `prompts`."""
    answer_column: str = "answer"
    """Column with the right answer, if there is one: rewards are rehearsed on it before training."""
    checks: DataChecks = DataChecks()


class RewardConfig(Section):
    function: str
    """A built-in reward's name, or `package.module:function` with TRL's signature, of a module that is installed, or a
    file in the working folder or beside the configuration."""
    name: str = Field(default_factory=lambda given: given["function"].rsplit(":", 1)[-1], pattern=r"^[.-]*\w[\w.-]*$")
    """Name in metrics, records and gates; default: the function's own. A function listed twice needs two names."""
    weight: float = 1.0
    """Factor of this reward in the sum."""
    clip: Bounds | None = None
    """Lowest and highest value that count: one beyond them counts as the nearer. Default: none."""
    normalize: bool = False
    """Count on a scale on which the bounds of `clip` are 0 and 1."""
    gate: str | None = None
    """Name of another reward: where that gives less than `gate_threshold`, or None, this one counts as 0. Default:
    none."""
    gate_threshold: float = 1.0
    """Least value of the reward named by `gate` at which this one counts."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments given to the function at each call."""
    timeout: float = Field(300.0, gt=0)
    """Seconds after which a call of the function counts as hung and stops the training."""
    range: Bounds | None = None
    """Lowest and highest value that the function may give; another one stops the run. Default: any, and for a built-in
    reward the range it documents."""
    isolated: bool = False
    """Run the function in a process of its own, which it may end, block or fill up without harm to the training:
    recommended for code that you did not write. The rewards are the same."""
    memory_gib: float = Field(8.0, gt=0)
    """Memory that an isolated reward's process may take, in GiB (its own, not what it shares)."""

    @field_validator("function")
    @classmethod
    def _is_no_path(cls, function: str) -> str:
        module, _, name = function.partition(":")
        if "/" in module or module.endswith(".py"):
            path = PurePath(module).with_suffix("")
            raise ValueError(
                f"{function!r} names a file; write '{path.name}:{name or 'FUNCTION'}', with {path.name}.py in the "
                "working folder or beside the configuration"
            )
        return function

    @model_validator(mode="after")
    def _args_can_be_written_as_toml(self) -> RewardConfig:
        missing = [key for key, value in self.args.items() if value is None]
        if missing:
            raise ValueError(f"args.{missing[0]} is null; leave it out to have the function's default")
        return self

    @model_validator(mode="after")
    def _args_are_keyword_arguments(self) -> RewardConfig:
        for key in self.args:
            if not key.isidentifier() or len(key) > LONGEST_ARGUMENT:
                raise ValueError(
                    f"args has the key {key!r}: an argument is a Python name of at most {LONGEST_ARGUMENT} characters"
                )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> RewardConfig:
        for key, bounds in {"range": self.range, "clip": self.clip}.items():
            if bounds and bounds[0] >= bounds[1]:
                raise ValueError(f"{key}={list(bounds)} is empty; give the lowest value first")
        if self.range and not self.range[1] - self.range[0] <= WIDEST_RANGE:
            raise ValueError(
                f"range={list(self.range)} is wider than {WIDEST_RANGE:g}, which bounds nothing; give the lowest and "
                "highest value that the function really gives, or leave it out"
            )
        if self.normalize and not self.clip:
            raise ValueError("normalize=true needs to know which values become 0 and 1; set clip = [lowest, highest]")
        if self.gate == self.name:
            raise ValueError(f"gate={self.gate!r} is the reward itself; name another one, or clip its values")
        if self.gate is None and self.gate_threshold != 1:
            raise ValueError(f"gate_threshold={self.gate_threshold:g} without a gate; name the reward in gate")
        if not self.isolated and self.memory_gib != 8:
            raise ValueError(
                f"memory_gib={self.memory_gib:g} limits nothing without a process of the reward's own; set "
                "isolated = true"
            )
        return self


class RolloutConfig(Section):
    engine: Literal["auto", "vllm", "vllm-server", "transformers"] = "auto"
    """What samples completions; `auto` takes vLLM on a GPU and transformers on a CPU. `vllm-server`: vLLM in processes
    of its own, on other GPUs or another machine."""
    num_generations: int = Field(8, ge=2)
    """G: completions sampled for each prompt."""
    max_completion_length: int = Field(256, ge=1)
    """Tokens after which a completion is cut off."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; log-probabilities in training are scaled by it too. At least 0.01 unless engine is
    `transformers`."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: the smallest set of tokens with at least this probability; 1 keeps all. The loss and the
    sampling correction compare probabilities over the whole vocabulary all the same."""
    top_k: int = Field(0, ge=0)
    """Sample among this many most likely tokens; 0 keeps all. For the loss, see top_p."""
    dynamic_sample: bool = False
    """Replace groups whose rewards are all equal by groups of fresh prompts (DAPO's dynamic sampling)."""
    max_resample_times: int = Field(3, ge=1)
    """Rounds of such replacements for a generation batch; what is left after them stays in it."""
    max_sync_drift: float | None = Field(None, gt=0)
    """Mean difference between the engine's and the trainer's log-probabilities of a fixed probe batch, after a weight
    update of the engine, above which training stops; default: 0.001, in bf16 0.1, or less if the engine does not follow
    the policy's movement."""
    gpu_memory_utilization: float = Field(0.3, gt=0, le=1)
    """Share of the GPU's memory that vLLM takes for its weights and KV cache."""
    cpu_kv_cache_gib: int = Field(1, ge=1)
    """vLLM's KV cache when it runs on a CPU, in GiB."""
    vllm_server_base_urls: list[str] = Field(default_factory=list)
    """vllm-server: addresses of running servers, such as http://10.0.0.5:8000; default: a training starts its own."""
    vllm_num_servers: int = Field(1, ge=1)
    """vllm-server: servers that a training starts on the GPUs after its own, or on the CPU."""
    vllm_tensor_parallel_size: int = Field(1, ge=1)
    """vllm-server: GPUs that share a copy of the model, in each server that a training starts."""
    vllm_data_parallel_size: int = Field(1, ge=1)
    """vllm-server: copies of the model in each server that a training starts."""
    vllm_weight_transfer: Literal["auto", "nccl", "ipc", "shared_memory"] = "auto"
    """vllm-server: how weights reach the servers that a training starts: between GPUs (nccl), on one GPU that trainer
    and server share (ipc), on the CPU (shared_memory); `auto` is nccl where there is a GPU."""
    vllm_server_timeout: float = Field(240.0, gt=0)
    """vllm-server: seconds that a server may be down, or take to start, before the training stops."""
    vllm_request_timeout: float = Field(1800.0, gt=0)
    """vllm-server: seconds that a server may take for an answer, or for new weights, before the training stops."""
    max_staleness: int = Field(0, ge=0, le=1)
    """vllm-server: 1 samples the next generation batch while this one is trained on, from the policy as it was before;
    the sampling correction accounts for the difference."""

    @model_validator(mode="after")
    def _temperature_can_be_sampled(self) -> RolloutConfig:
        if self.temperature < VLLM_MIN_TEMPERATURE and self.engine != "transformers":
            raise ValueError(
                f"temperature={self.temperature:g} with engine={self.engine!r}: vLLM samples at "
                f"{VLLM_MIN_TEMPERATURE:g} where less is asked for; set temperature to {VLLM_MIN_TEMPERATURE:g} or "
                "more, or engine to 'transformers'"
            )
        return self

    @model_validator(mode="after")
    def _servers_are_asked(self) -> RolloutConfig:
        if self.engine == "vllm-server":
            wrong = [url for url in self.vllm_server_base_urls if not url.startswith(("http://", "https://"))]
            if wrong:
                raise ValueError(f"vllm_server_base_urls: {wrong[0]!r} is no address such as http://127.0.0.1:8000")
            if len(set(self.vllm_server_base_urls)) < len(self.vllm_server_base_urls):
                raise ValueError(f"vllm_server_base_urls={self.vllm_server_base_urls} names a server twice")
            each = self.vllm_tensor_parallel_size, self.vllm_data_parallel_size
            if self.vllm_weight_transfer == "ipc" and (self.vllm_num_servers, *each) != (1, 1, 1):
                raise ValueError(
                    "vllm_weight_transfer='ipc' is for one server on one GPU, the training's own; "
                    f"vllm_num_servers={self.vllm_num_servers}, vllm_tensor_parallel_size={each[0]} and "
                    f"vllm_data_parallel_size={each[1]} have to be 1, or the transfer 'nccl'"
                )
        elif self.vllm_server_base_urls or self.max_staleness:
            raise ValueError(
                f"vllm_server_base_urls={self.vllm_server_base_urls} and max_staleness={self.max_staleness} are for "
                f"engine='vllm-server', which can sample while the policy is trained; engine is {self.engine!r}"
            )
        return self


class AlgorithmConfig(Section):
    """Rewards → advantages → loss; docs/reference/algorithm.md has each formula and its paper."""

    advantage_estimator: Literal["grpo", "rloo"] = "grpo"
    """What a reward is compared with: its group's mean (GRPO), or the mean of the others in its group (RLOO)."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the group's standard deviation, the batch's, or not at all (Dr. GRPO)."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Weighted sum of the rewards, then normalise; or normalise each reward in its group, then sum (GDPO)."""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"] = "dapo"
    """Loss of a token, and how tokens are averaged."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """One ratio per token (GRPO) or one per completion, the geometric mean of its tokens' (GSPO)."""
    epsilon: float = Field(0.2, ge=0)
    """Lower clipping bound of the ratio: 1 - epsilon."""
    epsilon_high: float | None = Field(None, ge=0)
    """Upper clipping bound is 1 + epsilon_high; default: epsilon. DAPO recommends 0.28. For cispo it is the bound
    itself (ScaleRL: 5.0)."""
    delta: float | None = Field(None, gt=1)
    """Bound of the ratio where the advantage is negative, above 1 + epsilon_high (two-sided clip); default: none."""
    sapo_temperature_pos: float = Field(1.0, gt=0)
    """sapo: temperature of the soft gate for positive advantages."""
    sapo_temperature_neg: float = Field(1.05, gt=0)
    """sapo: temperature of the soft gate for the others."""
    vespo_k_pos: float = Field(2.0, ge=0)
    """vespo: power of the sequence weight for advantages of 0 and above."""
    vespo_lambda_pos: float = Field(3.0, ge=0)
    """vespo: decay of the sequence weight for advantages of 0 and above."""
    vespo_k_neg: float = Field(3.0, ge=0)
    """vespo: power of the sequence weight for negative advantages."""
    vespo_lambda_neg: float = Field(2.0, ge=0)
    """vespo: decay of the sequence weight for negative advantages."""
    beta: float = Field(0.0, ge=0)
    """Weight of the KL to the reference policy; 0 needs none."""
    use_bias_correction_kl: bool = True
    """Multiply the KL estimate by the importance ratio, so that its gradient is unbiased off-policy."""
    sync_ref_model: bool = False
    """Move the reference policy towards the policy every ref_model_sync_steps updates (TR-DPO)."""
    ref_model_mixup_alpha: float = Field(0.6, gt=0, le=1)
    """New reference = alpha * policy + (1 - alpha) * old reference."""
    ref_model_sync_steps: int = Field(512, ge=1)
    """Updates between two moves of the reference policy."""
    mask_truncated_completions: bool = False
    """Leave completions that hit max_completion_length out of the loss (DAPO)."""
    top_entropy_quantile: float = Field(1.0, gt=0, le=1)
    """Share of the tokens, those of the highest entropy, whose policy loss is trained; 1 trains all."""
    off_policy_mask_threshold: float | None = Field(None, gt=0)
    """Leave out completions with a negative advantage from which the policy has moved away by more than this mean
    log-ratio (DeepSeek-V3.2); default: none."""
    vllm_importance_sampling_correction: bool = True
    """Correct for the difference between the sampling engine's (any engine's) log-probabilities and the trainer's, both
    at the sampling temperature and before top_p and top_k."""
    vllm_importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        "sequence_mask"
    )
    """One correction per token or per completion; outside the bounds it is clamped (truncate) or made 0 (mask)."""
    vllm_importance_sampling_clip_max: float = Field(3.0, gt=0)
    """Upper bound of the correction."""
    vllm_importance_sampling_clip_min: float | None = Field(None, gt=0)
    """Lower bound of the correction; default: none."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of an entropy bonus; with use_adaptive_entropy, its first value."""
    use_adaptive_entropy: bool = False
    """Raise entropy_coef while entropy is at or below entropy_target, lower it else (Skywork-OR1); the bonus applies
    only while it is at or below."""
    entropy_coef_min: float = Field(0.0, ge=0)
    """Adaptive entropy: lower bound of the weight."""
    entropy_coef_max: float = Field(1.0, ge=0)
    """Adaptive entropy: upper bound of the weight."""
    entropy_coef_delta: float = Field(0.005, gt=0)
    """Adaptive entropy: change of the weight after an update."""
    entropy_target: float = Field(0.2, ge=0, le=HIGHEST_ENTROPY)
    """Adaptive entropy: mean entropy of a token to keep, in nats."""

    @model_validator(mode="after")
    def _consistent(self) -> AlgorithmConfig:
        problem = None
        if self.multi_objective_aggregation == "normalize_then_sum" and (
            self.advantage_estimator != "grpo" or self.scale_rewards != "group"
        ):
            problem = (
                "multi_objective_aggregation='normalize_then_sum' normalises in its own way; leave advantage_estimator "
                f"and scale_rewards at 'grpo' and 'group' (they are {self.advantage_estimator!r} and "
                f"{self.scale_rewards!r})"
            )
        elif self.delta is not None and self.delta <= 1 + self.upper_clip:
            problem = (
                f"delta={self.delta:g} must be above 1 + epsilon_high = {1 + self.upper_clip:g}, which clips first"
            )
        elif self.delta is not None and self.loss_type in ("cispo", "sapo", "vespo"):
            problem = f"loss_type={self.loss_type!r} does not clip in two sides; remove delta"
        elif self.loss_type == "vespo" and self.importance_sampling_level != "token":
            problem = "loss_type='vespo' makes its own sequence weight; use importance_sampling_level='token'"
        elif self.loss_type == "luspo" and self.importance_sampling_level != "sequence":
            problem = "loss_type='luspo' is defined on sequences; set importance_sampling_level='sequence'"
        elif self.loss_type == "cispo" and self.epsilon_high is None:
            problem = "loss_type='cispo' takes epsilon_high as the bound of the ratio itself; set it (ScaleRL: 5.0)"
        elif self.loss_type == "vespo" and self._corrects_by_sequence:
            problem = (
                f"loss_type='vespo' sums the corrections of tokens; vllm_importance_sampling_mode="
                f"{self.vllm_importance_sampling_mode!r} has none: use 'token_truncate' or 'token_mask'"
            )
        elif (self.vllm_importance_sampling_clip_min or 0) > self.vllm_importance_sampling_clip_max:
            problem = (
                f"vllm_importance_sampling_clip_min={self.vllm_importance_sampling_clip_min:g} is above "
                f"vllm_importance_sampling_clip_max={self.vllm_importance_sampling_clip_max:g}"
            )
        elif self.sync_ref_model and self.beta == 0:
            problem = "sync_ref_model=true has no reference policy to move while beta=0; set beta or remove it"
        elif self.entropy_coef_min > self.entropy_coef_max:
            problem = f"entropy_coef_min={self.entropy_coef_min:g} is above entropy_coef_max={self.entropy_coef_max:g}"
        if problem:
            raise ValueError(problem)
        return self

    @property
    def upper_clip(self) -> float:
        """epsilon_high, or epsilon where it is not given."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def has_entropy_bonus(self) -> bool:
        return self.use_adaptive_entropy or self.entropy_coef > 0

    @property
    def _corrects_by_sequence(self) -> bool:
        return self.vllm_importance_sampling_correction and self.vllm_importance_sampling_mode.startswith("sequence")


HealthAction = Literal["warn", "stop", "roll_back"]


class HealthConfig(Section):
    """What counts as unhealthy and what is done then: warn, stop, or roll back to the last healthy checkpoint and go on
    from there with fresh samples and half the learning rate."""

    patience: int = Field(5, ge=1)
    """Updates in a row that a limit has to be broken before its action is taken."""
    max_roll_backs: int = Field(2, ge=1)
    """Roll-backs after which the next one is a stop."""
    zero_advantages_steps: int = Field(20, ge=1)
    """Limit: updates in a row in which no completion has an advantage."""
    zero_advantages_action: HealthAction = "warn"
    """What to do when this limit is broken: warn, stop the training, or roll back."""
    min_entropy: float = Field(1e-3, ge=0, le=HIGHEST_ENTROPY)
    """Limit: mean entropy of a token, in nats; below, the policy says one thing only."""
    entropy_action: HealthAction = "warn"
    """What to do when this limit is broken: warn, stop the training, or roll back."""
    max_kl: float = Field(10.0, gt=0)
    """Limit: mean KL to the reference policy, in nats per token."""
    kl_action: HealthAction = "stop"
    """What to do when this limit is broken: warn, stop the training, or roll back."""
    max_clip_ratio: float = Field(0.5, gt=0, le=1)
    """Limit: share of tokens whose gradient the clip removes."""
    clip_ratio_action: HealthAction = "warn"
    """What to do when this limit is broken: warn, stop the training, or roll back."""
    max_log_ratio: float = Field(5.0, gt=0)
    """Limit: largest |log-ratio| between the policy and the one that sampled, of a token."""
    log_ratio_action: HealthAction = "warn"
    """What to do when this limit is broken: warn, stop the training, or roll back."""
    max_clipped_length: float = Field(0.9, gt=0, le=1)
    """Limit: share of completions that hit max_completion_length."""
    clipped_length_action: HealthAction = "warn"
    """What to do when this limit is broken: warn, stop the training, or roll back."""
    min_importance_sampling_ratio: float = Field(0.5, ge=0)
    """Limit: mean sampling correction of a token; below, the correction removes most of the gradient."""
    importance_sampling_ratio_action: HealthAction = "warn"
    """What to do when this limit is broken: warn, stop the training, or roll back."""
    not_finite_action: Literal["stop", "roll_back"] = "stop"
    """What is done at once when a loss, gradient or log-probability is NaN or infinite."""


class TrainConfig(Section):
    num_processes: int = Field(1, ge=1)
    """Training processes (one per GPU) started by `accelerate launch`."""
    mixed_precision: Literal["no", "bf16"] = "no"
    """`bf16` computes with a bfloat16 copy of the weights; weights, gradients and optimizer stay float32."""
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
    num_train_epochs: float = Field(1.0, gt=0, le=MOST)
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
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, updates a third longer."""
    save_steps: int = Field(100, ge=1)
    """A checkpoint every this many updates."""
    save_total_limit: int = Field(2, ge=1)
    """Checkpoints kept, newest first; the newest healthy one is always among them."""
    eval_steps: int | None = Field(None, ge=1)
    """Evaluate on the held-out prompts every this many updates and after the last; default: never during training."""
    metric_for_best_model: Literal["eval_reward", "eval_accuracy"] = "eval_reward"
    """The evaluation metric that says which model is best; larger is better."""
    load_best_model_at_end: bool = False
    """Hand on the best evaluated model instead of the last."""
    early_stopping_patience: int | None = Field(None, ge=1)
    """Stop after this many evaluations in a row without a new best; default: never."""
    early_stopping_threshold: float = Field(0.0, ge=0)
    """How much better than the best an evaluation has to be to count as a new best for early stopping."""

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
        needs_evaluation = {
            "load_best_model_at_end": self.load_best_model_at_end,
            "early_stopping_patience": self.early_stopping_patience,
        }
        for key, value in needs_evaluation.items():
            if value and self.eval_steps is None:
                raise ValueError(f"{key}={value} needs evaluations to go by; set eval_steps")
        return self
