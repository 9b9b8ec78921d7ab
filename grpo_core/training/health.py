"""The health policy: limits that a training should not break, what breaking one means, and what to try."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from grpo_core.config.training import HealthConfig, StalenessAction

NO_SIGNAL = ("zero_advantages", "unscored")  # rules about groups without a signal


@dataclass(frozen=True)
class Finding:
    """A broken limit: what to do, and the sentence for the log."""

    step: int
    rule: str
    action: StalenessAction
    message: str


@dataclass(frozen=True)
class _Rule:
    name: str
    metric: str
    sign: int  # 1: broken above the limit, -1: broken below
    limit: float
    steps: int
    action: StalenessAction
    advice: str


def observe(
    config: HealthConfig, streaks: Mapping[str, int], step: int, metrics: Mapping[str, float]
) -> tuple[dict[str, int], list[Finding]]:
    """Return new streaks (updates in a row that broke each limit) and the findings after update `step`.

    A finding comes when a streak reaches its length, and again each time it has grown by that length.
    """
    # Silent groups teach nothing, except with a teacher that has something to show.
    silent = NO_SIGNAL if metrics.get("teacher_shown", float("teacher_kl" in metrics)) else ()
    rules = {rule.name: rule for rule in _rules(config) if rule.name not in silent}
    excess = {name: rule.sign * (metrics.get(rule.metric, rule.limit) - rule.limit) for name, rule in rules.items()}
    broken = {name: rules[name] for name in rules if excess[name] > 0}
    grown = {name: streaks.get(name, 0) + 1 for name in broken}
    return grown, [
        Finding(step, name, rule.action, _sentence(rule, step, grown[name], metrics))
        for name, rule in broken.items()
        if grown[name] % rule.steps == 0
    ]


def not_finite(config: HealthConfig, step: int, error: Exception) -> Finding:
    """Return the finding for a NaN or infinity: what comes after cannot be right, so it is never a mere warning."""
    return Finding(
        step,
        "not_finite",
        config.not_finite_action,
        f"{error}. The weights, or a number on the way to their gradient, are broken: an update was too large, or the "
        "base model is damaged. Lower "
        "train.learning_rate or train.max_grad_norm, or look at this step's completions and rewards. The "
        "newest checkpoint that a healthy step followed is kept: health.not_finite_action = 'roll_back' goes on from "
        "it",
    )


def is_healthy(config: HealthConfig, streaks: Mapping[str, int]) -> bool:
    """True if no limit that would roll the training back is being broken: these weights are worth returning to."""
    return not any(rule.action == "roll_back" and streaks.get(rule.name) for rule in _rules(config))


def may_roll_back(config: HealthConfig) -> bool:
    return "roll_back" in (config.not_finite_action, *(rule.action for rule in _rules(config)))


def _rules(c: HealthConfig) -> list[_Rule]:
    return [
        _Rule(
            "zero_advantages", "frac_reward_zero_std", 1, 1 - 1e-9, c.zero_advantages_steps, c.zero_advantages_action,
            "within each group all completions got the same reward, or none: nothing to learn from. Look at the "
            "completions: the prompts are too easy, too hard, or the reward cannot tell answers apart. Mix in prompts "
            "of other difficulty, raise num_generations or temperature, set rollout.dynamic_sample or data.curriculum",
        ),
        _Rule(
            "unscored", "frac_unscored", 1, 1 - 1e-9, c.zero_advantages_steps, "stop",
            "each reward gave None to each completion, or each conversation failed, so no update changed anything. Let "
            "one of the rewards give a number, or take out the prompts to which none applies",
        ),
        _Rule(
            "entropy", "entropy", -1, c.min_entropy, c.patience, c.entropy_action,
            "the policy gives nearly the same output each time and stops exploring. Raise algorithm.epsilon_high "
            "(0.28) or algorithm.entropy_coef, lower train.learning_rate, or take a checkpoint from before",
        ),
        _Rule(
            "kl", "kl", 1, c.max_kl, c.patience, c.kl_action,
            "the policy is far from its reference and may have lost its language. Lower train.learning_rate or raise "
            "algorithm.beta; look whether the completions game a reward",
        ),
        _Rule(
            "clip_ratio", "clip_ratio/region_mean", 1, c.max_clip_ratio, c.patience, c.clip_ratio_action,
            "most tokens have no gradient because the policy has moved away from the one that sampled them. Lower "
            "train.num_iterations, steps_per_generation or learning_rate, or widen algorithm.epsilon",
        ),
        _Rule(
            "log_ratio", "log_ratio/max", 1, c.max_log_ratio, c.patience, c.log_ratio_action,
            "trainer and engine give a sampled token probabilities that differ by a factor of e to that power. The two "
            "differ (precision, sampling settings), or the rollout is too old (with rollout.max_staleness "
            "above 0 there are always updates between): lower num_iterations, learning_rate or max_staleness, or use "
            "the same precision on both sides",
        ),
        _Rule(
            "clipped_length", "completions/clipped_ratio", 1, c.max_clipped_length, c.patience, c.clipped_length_action,
            "nearly all completions are cut off before they end, so their rewards say little. Raise "
            "rollout.max_completion_length, add soft_overlong_punishment to the rewards, or check that the model and "
            "its chat template end their answers",
        ),
        _Rule(
            "importance_sampling_ratio", "sampling/importance_sampling_ratio/mean", -1,
            c.min_importance_sampling_ratio, c.patience, c.importance_sampling_ratio_action,
            "the sampling correction, about 1 where engine and trainer agree, multiplies most of the gradient by "
            "almost nothing. In the sequence modes small differences add up over a long completion: set "
            "algorithm.vllm_importance_sampling_mode = 'token_truncate', use the same precision on both sides, or "
            "lower rollout.max_staleness or train.learning_rate",
        ),
        _Rule(
            "effective_sample_share", "sampling/effective_sample_share", -1,
            c.min_effective_sample_share, c.patience, c.effective_sample_share_action,
            "under the sampling correction a few tokens make most of the gradient: the samples are too old for the "
            "policy, or engine and trainer differ. Lower rollout.max_staleness (health.effective_sample_share_action "
            "= 'lower_staleness' does), train.learning_rate or algorithm.vllm_importance_sampling_clip_max, or set "
            "algorithm.vllm_importance_sampling_mode = 'token_truncate'",
        ),
        _Rule(
            "routing_difference", "sampling/routing_difference", 1, c.max_routing_difference, c.patience,
            c.routing_difference_action,
            "trainer and engine send tokens through different experts, which makes such trainings collapse. Set "
            "algorithm.routing_replay = true, or use the same precision on both sides",
        ),
        _Rule(
            "failed_conversations", "conversations/failed", 1, c.max_failed_conversations, c.patience,
            c.failed_conversations_action,
            "tools hang or end their process, or environments fail; these conversations have no reward, or the policy "
            "learns to avoid the tool. Their messages and `environment_failure` stand in completions/; raise "
            "environment.tool_timeout if a tool is only slow",
        ),
        _Rule(
            "verifier_errors", "environment/verifier_errors", 1, c.max_verifier_errors, c.patience,
            c.verifier_errors_action,
            "most answers are such that the verifier raises or takes too long, which is a reward of 0. What it raised "
            "stands in completions/ as `verifier_error`: let the prompts say in which form the answer is handed in, or "
            "leave this kind of task out",
        ),
    ]  # fmt: skip


def _sentence(rule: _Rule, step: int, streak: int, metrics: Mapping[str, float]) -> str:
    value = metrics[rule.metric]
    side = "above" if rule.sign > 0 else "below"
    shares = {"zero_advantages": "no completion has an advantage", "unscored": "no reward applied to any completion"}
    figure = shares.get(rule.name, f"{rule.metric} = {value:.4g} is {side} {rule.limit:g}")
    if rule.name == "failed_conversations":
        lost = {name.split("/")[1]: share for name, share in metrics.items() if name.endswith("/lost") and share}
        figure += "".join(f" (tool {name}: {share:.0%} of its calls are lost)" for name, share in lost.items())
    return f"step {step}: {figure}, {streak} updates in a row: {rule.advice}"
