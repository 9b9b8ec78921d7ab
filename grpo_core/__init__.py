"""The GRPO algorithm: config, plan, rollouts, rewards, losses and the training loop.

Knows neither Prefect nor MLflow nor pandera; usable alone with `torchrun -m grpo_core.train RUN_DIR`.
"""

__version__ = "0.1.0"
