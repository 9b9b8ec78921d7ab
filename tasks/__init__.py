"""The stages: one module each with the Prefect task and what it needs. Knows grpo_core, not flows."""
