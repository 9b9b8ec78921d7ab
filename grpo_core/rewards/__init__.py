"""Reward functions: their contract, running them on a batch, combining their values."""
