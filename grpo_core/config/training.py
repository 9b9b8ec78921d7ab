"""`[train]` and `[health]`: the optimizer, its batches, checkpoints, and the limits of a healthy training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from grpo_core.config.base import HIGHEST_ENTROPY, LONGEST_SECONDS, MAX_COUNT, Section

HealthAction = Literal["warn", "stop", "roll_back"]
StalenessAction = Literal["warn", "stop", "roll_back", "lower_staleness"]  # of limits between engine and trainer
BF16_CAPABILITY = (8, 0)  # of the first GPUs that multiply bfloat16 in hardware (Ampere)


class HealthConfig(Section):
    """Limits that a healthy training keeps, and what to do when one is broken: warn, stop, or roll back to the last
    healthy checkpoint and continue from there with fresh samples and half the learning rate; between engine and
    trainer, also sample less far ahead."""

    patience: int = Field(5, ge=1)
    """Updates in a row that have to break a limit before its action is taken."""
    max_roll_backs: int = Field(2, ge=1)
    """Number of roll-backs; instead of one more, the training stops."""
    zero_advantages_steps: int = Field(20, ge=1)
    """Limit: updates in a row in which no completion has an advantage."""
    zero_advantages_action: HealthAction = "warn"
    """What to do when this limit is broken: warn, stop the training, or roll back."""
    min_entropy: float = Field(1e-3, ge=0, le=HIGHEST_ENTROPY)
    """Limit: lowest mean entropy per token, in nats; below it, the policy says one thing only."""
    entropy_action: HealthAction = "warn"
    """What to do when this limit is broken: warn, stop the training, or roll back."""
    max_kl: float = Field(10.0, gt=0)
    """Limit: highest mean KL to the reference policy, in nats per token."""
    kl_action: HealthAction = "stop"
    """What to do when this limit is broken: warn, stop the training, or roll back."""
    max_clip_ratio: float = Field(0.5, gt=0, le=1)
    """Limit: highest share of tokens whose gradient the clip removes."""
    clip_ratio_action: HealthAction = "warn"
    """What to do when this limit is broken: warn, stop the training, or roll back."""
    max_log_ratio: float = Field(5.0, gt=0)
    """Limit: largest |log-ratio| of a token between the policy and the one that sampled."""
    log_ratio_action: StalenessAction = "warn"
    """What to do when this limit is broken: warn, stop the training, roll back, or continue with half the
    rollout.max_staleness."""
    max_clipped_length: float = Field(0.9, gt=0, le=1)
    """Limit: highest share of completions that are cut off at max_completion_length."""
    clipped_length_action: HealthAction = "warn"
    """What to do when this limit is broken: warn, stop the training, or roll back."""
    min_importance_sampling_ratio: float = Field(0.5, ge=0)
    """Limit: lowest mean sampling correction per token; below it, the correction removes most of the gradient."""
    importance_sampling_ratio_action: StalenessAction = "warn"
    """What to do when this limit is broken: warn, stop the training, roll back, or continue with half the
    rollout.max_staleness."""
    min_effective_sample_share: float = Field(0.5, ge=0, le=1)
    """Limit: lowest effective sample size under the sampling correction, as a share of the trained tokens; below it, a
    few tokens make most of the gradient."""
    effective_sample_share_action: StalenessAction = "warn"
    """What to do when this limit is broken: warn, stop the training, roll back, or continue with half the
    rollout.max_staleness."""
    max_routing_difference: float = Field(0.2, gt=0, le=1)
    """Limit, of mixtures of experts: highest share of layers in which the trainer's routers choose other experts for a
    token than the engine's did, with the same weights."""
    routing_difference_action: HealthAction = "warn"
    """What to do when this limit is broken: warn, stop the training, or roll back."""
    max_failed_conversations: float = Field(0.1, gt=0, le=1)
    """Limit: highest share of conversations in which a tool hangs or ends its process, or the environment fails."""
    failed_conversations_action: HealthAction = "stop"
    """What to do when this limit is broken: warn, stop the training, or roll back."""
    max_verifier_errors: float = Field(0.5, gt=0, le=1)
    """Limit: highest share of conversations about whose answer a verifier of reasoning-gym raises or takes too long;
    their reward is 0."""
    verifier_errors_action: HealthAction = "warn"
    """What to do when this limit is broken: warn, stop the training, or roll back."""
    not_finite_action: Literal["stop", "roll_back"] = "stop"
    """What to do, without patience, when a loss, gradient or log-probability is NaN or infinite: stop the training, or
    roll back."""

    @property
    def lowering(self) -> list[str]:
        """Keys whose action lowers rollout.max_staleness."""
        return [key for key, value in self if value == "lower_staleness"]


class TrainConfig(Section):
    num_processes: int = Field(1, ge=1)
    """Training processes, one per GPU, on all machines together; several are started by torchrun."""
    num_machines: int = Field(1, ge=1)
    """Machines that the processes are divided among, with equally many on each; more than one needs
    `launch.launcher`."""
    max_restarts: int = Field(0, ge=0)
    """How often a training restarts by itself, from its newest checkpoint, after a failure from outside: a process
    killed by a signal (out of memory, for instance), a machine or the network to it gone, a process that hangs outside
    of rewards. An evaluation starts over as often."""
    hang_timeout: float = Field(600.0, gt=0, le=LONGEST_SECONDS)
    """Seconds without progress after which a process of a training or evaluation counts as hanging, and all are ended.
    The limit is higher in the first pass through a phase (six times), where this run has needed longer before (ten
    times that long), and within the time limits of rewards, servers and checkpoints."""
    mixed_precision: Literal["auto", "no", "bf16"] = "auto"
    """`bf16` computes and samples with a bfloat16 copy of the weights; weights, logits, gradients and optimizer stay
    float32. `auto`: bf16 on a GPU of compute capability 8.0 or higher, otherwise no."""
    per_device_train_batch_size: int = Field(8, ge=1)
    """Mean number of completions per process and micro-step; processes get about equally many tokens. A forward pass
    has at most the tokens of that many sequences of the greatest length, unless max_tokens_per_pass is set."""
    max_tokens_per_pass: int | None = Field(None, ge=1)
    """Most tokens, prompts and completions together, of one forward pass of a process; not less than the longest
    sequence has. Default: those of per_device_train_batch_size sequences of the greatest length, or as many of them as
    a GPU's memory holds by the plan's forecast; plan.json has the number. A CPU's passes have no more than 2,048 in any
    case. Results differ by rounding alone."""
    gradient_accumulation_steps: int = Field(1, ge=1)
    """Micro-steps per optimizer update."""
    steps_per_generation: int | None = Field(None, ge=1)
    """Micro-steps that one generation batch feeds; default: gradient_accumulation_steps."""
    generation_batch_size: int | None = Field(None, ge=1)
    """Completions sampled together, over all processes; give this or steps_per_generation, not both."""
    num_iterations: int = Field(1, ge=1)
    """Passes over each generation batch (mu in the GRPO paper)."""
    num_train_epochs: float = Field(1.0, gt=0, le=MAX_COUNT)
    """Passes over the prompts; may be fractional."""
    max_steps: int | None = Field(None, ge=1)
    """Optimizer updates; overrides num_train_epochs."""
    optim: Literal["adamw", "adamw_8bit"] = "adamw"
    """The optimizer. `adamw_8bit`: AdamW whose moments have 8 bits, with a float32 scale per 256 of them: about 2 bytes
    per trained parameter instead of 8. Sharded, it continues only with the same number of processes."""
    offload: Literal["none", "optimizer"] = "none"
    """What the host's memory holds between updates. `optimizer`: AdamW's moments; they come to the GPU for each update,
    one parameter after the other, which takes time. Results are the same bit for bit, and a training may continue with
    another value. No effect on a CPU."""
    learning_rate: float = Field(1e-6, gt=0)
    """AdamW's peak learning rate."""
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    """Course of the learning rate after warm-up."""
    warmup_steps: float = Field(0, ge=0)
    """Updates of linear warm-up; a value below 1 is a fraction of max_steps."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay (biases and norms excluded)."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's first-moment decay."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """AdamW's second-moment decay."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients with a larger global norm are scaled down to it."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, updates a third longer."""
    torch_compile: bool = False
    """Compile the decoder layers by torch.compile in the first update, for training and scoring; sampling runs
    uncompiled. Needs a C compiler. Hardly faster on a CPU; on one H200, an earlier form of it changed nothing."""
    deterministic: bool = False
    """Repeat a training bit for bit on a GPU, stopped and continued too, by PyTorch's deterministic kernels; needs
    `rollout.engine = "transformers"` or `"recorded"`. Costs time: about an eighth of a small training on one H200. A
    training may continue with another value. No effect on a CPU, which repeats without it."""
    sharding: Literal["none", "full", "hybrid"] = "none"
    """What each process holds of weights, gradients and optimizer state. `none`: all. `full`: an equal share; the
    weights of a layer are gathered while that layer computes. `hybrid`: a share within its machine, so that weights
    are gathered within a machine, and only gradients go from one machine to another."""
    save_steps: int = Field(100, ge=1)
    """Updates between two checkpoints."""
    save_total_limit: int = Field(2, ge=1)
    """Checkpoints kept, newest first; the newest healthy one is always among them."""
    eval_steps: int | None = Field(None, ge=1)
    """Updates between two evaluations on the held-out prompts; the last update is always followed by one. Default: none
    during training."""
    metric_for_best_model: Literal["eval_reward", "eval_accuracy"] = "eval_reward"
    """Metric of the evaluations that says which model is best; larger is better."""
    load_best_model_at_end: bool = False
    """Keep the best evaluated model as the result, not the last one."""
    early_stopping_patience: int | None = Field(None, ge=1)
    """Stop after this many evaluations in a row without a new best; default: never."""
    early_stopping_threshold: float = Field(0.0, ge=0)
    """How much better than the best so far an evaluation has to be to count as a new best for early stopping."""

    @property
    def processes_per_machine(self) -> int:
        return self.num_processes // self.num_machines

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
        if self.num_processes % self.num_machines:
            raise ValueError(
                f"num_processes={self.num_processes} cannot be divided equally among num_machines={self.num_machines}: "
                "num_processes counts the processes of all machines; make it a multiple of num_machines"
            )
        if self.sharding != "none" and self.num_processes == 1:
            raise ValueError(
                f"sharding={self.sharding!r} with num_processes=1: a single process holds everything; raise "
                "num_processes, or set sharding to 'none'"
            )
        if self.sharding != "none" and self.torch_compile:
            raise ValueError(
                f"sharding={self.sharding!r} with torch_compile=true: the two have not been run together; turn one off"
            )
        if self.deterministic and self.torch_compile:
            raise ValueError(
                "deterministic=true with torch_compile=true: what is compiled may differ from one start to the next; "
                "turn one off"
            )
        needs_evaluation = {
            "load_best_model_at_end": self.load_best_model_at_end,
            "early_stopping_patience": self.early_stopping_patience,
        }
        for key, value in needs_evaluation.items():
            if value and self.eval_steps is None:
                raise ValueError(f"{key}={value} needs evaluations during training; set eval_steps")
        return self
