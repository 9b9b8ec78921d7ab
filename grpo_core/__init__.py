"""The algorithm: training, evaluation and their plan, usable without Prefect and MLflow."""

__version__ = "0.1.0"
