"""Policies compared on the same prompts: samples, outcomes per prompt, statistics, the report."""
