"""`[algorithm]`: rewards → advantages → loss."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from grpo_core.config.base import HIGHEST_ENTROPY, Section
from grpo_core.config.losses import LOSSES, LossType


class AlgorithmConfig(Section):
    """Rewards → advantages → loss; docs/reference/algorithm.md has each formula and its paper."""

    advantage_estimator: Literal["grpo", "rloo"] = "grpo"
    """Baseline of a reward: its group's mean (GRPO), or the mean of the others in its group (RLOO)."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the group's standard deviation, the batch's, or not at all (Dr. GRPO)."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Sum the weighted rewards, then normalise; or normalise each reward in its group, then sum (GDPO)."""
    loss_type: LossType = "dapo"
    """Loss per token, and how the losses of tokens are averaged."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """One ratio per token (GRPO) or one per completion, the geometric mean of its tokens' (GSPO)."""
    epsilon: float = Field(0.2, ge=0)
    """Lower clipping bound of the ratio: 1 - epsilon."""
    epsilon_high: float | None = Field(None, ge=0)
    """Upper clipping bound of the ratio: 1 + epsilon_high; default: epsilon. DAPO recommends 0.28. For cispo, the bound
    itself (ScaleRL: 5.0)."""
    delta: float | None = Field(None, gt=1)
    """Upper bound of the ratio where the advantage is negative (two-sided clip), above 1 + epsilon_high; default:
    none."""
    sapo_temperature_pos: float = Field(1.0, gt=0)
    """sapo: temperature of the soft gate for positive advantages."""
    sapo_temperature_neg: float = Field(1.05, gt=0)
    """sapo: temperature of the soft gate for advantages of 0 and below."""
    vespo_k_pos: float = Field(2.0, ge=0)
    """vespo: power of the sequence weight for advantages of 0 and above."""
    vespo_lambda_pos: float = Field(3.0, ge=0)
    """vespo: decay of the sequence weight for advantages of 0 and above."""
    vespo_k_neg: float = Field(3.0, ge=0)
    """vespo: power of the sequence weight for negative advantages."""
    vespo_lambda_neg: float = Field(2.0, ge=0)
    """vespo: decay of the sequence weight for negative advantages."""
    beta: float = Field(0.0, ge=0)
    """Weight of the KL to the reference policy; 0 trains without a reference policy."""
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
    """Train the policy loss on this fraction of the tokens, those with the highest entropy; 1 trains on all tokens."""
    off_policy_mask_threshold: float | None = Field(None, gt=0)
    """Leave out completions with a negative advantage if the policy has moved away from them by more than this mean
    log-ratio (DeepSeek-V3.2); default: leave none out."""
    vllm_importance_sampling_correction: bool = True
    """Correct for the difference between the log-probabilities of the engine that samples (any engine) and those of the
    trainer, both of the distribution that is sampled."""
    vllm_importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        "token_truncate"
    )
    """One correction per token or per completion; outside the bounds it is clamped (truncate) or set to 0 (mask)."""
    vllm_importance_sampling_clip_max: float = Field(3.0, gt=0)
    """Upper bound of the correction."""
    vllm_importance_sampling_clip_min: float | None = Field(None, gt=0)
    """Lower bound of the correction; default: none."""
    router_aux_loss_coef: float = Field(0.0, ge=0)
    """Mixtures of experts: weight of the loss that balances the routers' use of experts (Switch Transformers,
    arXiv:2101.03961); 0 leaves it out. It costs one more forward pass of the update's rows. With routing_replay, the
    routers' own choices count. TRL's default is the model's own value."""
    routing_replay: bool = False
    """Mixtures of experts: training passes take the experts that the engine took when it sampled, with gate weights
    from the policy's own router logits (arXiv:2510.11370), for the update and for old log-probabilities."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of an entropy bonus; with use_adaptive_entropy, its first value."""
    use_adaptive_entropy: bool = False
    """Raise entropy_coef while entropy is at or below entropy_target, else lower it (Skywork-OR1); the bonus applies
    only while entropy is at or below the target."""
    entropy_coef_min: float = Field(0.0, ge=0)
    """Adaptive entropy: lower bound of the weight."""
    entropy_coef_max: float = Field(1.0, ge=0)
    """Adaptive entropy: upper bound of the weight."""
    entropy_coef_delta: float = Field(0.005, gt=0)
    """Adaptive entropy: change of the weight after each update."""
    entropy_target: float = Field(0.2, ge=0, le=HIGHEST_ENTROPY)
    """Adaptive entropy: mean entropy per token to keep, in nats."""

    @model_validator(mode="after")
    def _consistent(self) -> AlgorithmConfig:
        problem, loss = None, LOSSES[self.loss_type]
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
        elif self.delta is not None and loss.term != "clipped":
            problem = f"loss_type={self.loss_type!r} does not clip in two sides; remove delta"
        elif unfit := next(iter(loss.problems(self)), None):
            problem = unfit
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
        """epsilon_high, or epsilon if it is not given."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def has_entropy_bonus(self) -> bool:
        return self.use_adaptive_entropy or self.entropy_coef > 0

    @property
    def trains_every(self) -> bool:
        """True if completions without an advantage have a gradient too."""
        return self.beta > 0 or self.has_entropy_bonus or self.router_aux_loss_coef > 0

    @property
    def router_keys(self) -> list[str]:
        """Keys that are set for mixtures of experts whose routers can be read."""
        return [key for key in ("router_aux_loss_coef", "routing_replay") if getattr(self, key)]
