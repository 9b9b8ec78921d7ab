"""Reward functions: the contract, running them on a batch, and the built-in ones."""
