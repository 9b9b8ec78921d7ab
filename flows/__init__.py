"""Prefect flows and the command line. Knows tasks and grpo_core."""
