"""The recipe as a script for TRL 1.16: `pip install trl==1.16.0`, then `python -m examples.smallest.train_trl`.

TRL's first example, with the small form's model, data and budgets. configs/smallest.toml says the same.
"""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("parquet", data_files="storage/examples/smallest/train.parquet", split="train")


def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]


args = GRPOConfig(
    output_dir="storage/examples/smallest-trl",
    seed=0,
    num_generations=8,
    max_completion_length=32,
    per_device_train_batch_size=64,
    max_steps=30,
    learning_rate=3e-4,
    lr_scheduler_type="constant",
    save_steps=15,
    bf16=False,
    use_cpu=True,
    logging_steps=1,
    report_to="none",
)
trainer = GRPOTrainer(model="storage/examples/smallest/base", reward_funcs=reward_len, args=args, train_dataset=dataset)
trainer.train()
