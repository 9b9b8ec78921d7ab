"""Reward functions: the contract, running them on a batch, what of their values counts."""
