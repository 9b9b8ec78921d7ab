"""The algorithm: training, evaluation and their plan, usable without Prefect and MLflow."""

from grpo_core.system import beside

__version__ = "0.1.0"

beside.inherit()  # in processes of rewards and environments, and in those that their code starts
