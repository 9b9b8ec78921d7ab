"""Reward functions of other frameworks, as functions with the contract of `grpo_core.rewards.contract`."""
