"""Reward functions of other frameworks, as functions with the contract of `grpo_core.rewards.contract`.

Each module has `adapted(found, args, what)`: what the name stands for, the names in the config's `args`, and the reward
as a part of a sentence. It raises RewardError if that is not what the framework calls.
"""
