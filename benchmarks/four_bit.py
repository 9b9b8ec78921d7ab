"""Measures the effect of a 4-bit base: trains a LoRA over it on the quickstart's sums, and compares the policy with the
saved model, and with the adapter over the original base."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.conftest import config_values

SUMS = Path("storage/examples/arithmetic")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sums", type=Path, default=SUMS, help=f"what python -m examples.arithmetic.make wrote; default {SUMS}"
    )
    parser.add_argument("--updates", type=int, default=40)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, (right, distance) in measure(Path(folder), arguments.sums, arguments.updates).items():
            print(f"{name}: {right:.1%} right, log-probabilities {distance:.3f} nats per token from the 4-bit ones")


def measure(folder: Path, sums: Path, updates: int) -> dict[str, tuple[float, float]]:
    """Measure the share of held-out sums that each policy answers correctly, and the mean distance of its
    log-probabilities from those of its 4-bit twin, on the twin's greedy answers."""
    import pyarrow.parquet as pq

    from grpo_core.config.files import dump_config, parse_config
    from grpo_core.data.prompts import load_tokenizer
    from grpo_core.model.loading import load_model, with_adapter
    from grpo_core.planning.plan import make_plan, plan_inputs
    from grpo_core.training.loop import train

    keys: dict[str, Any] = {"use_peft": True, "load_in_4bit": True, "lora_r": 16, "learning_rate": 1e-3}
    keys |= {"max_steps": updates, "per_device_train_batch_size": 256, "gradient_accumulation_steps": 1}
    keys |= {"num_generations": 8, "max_completion_length": 6}
    values = config_values(sums / "base", sums, **keys)
    config = parse_config({**values, "rewards": [{"function": "numeric_match"}]})
    run = folder / "run"
    (run / "dataset").mkdir(parents=True)
    for name in ("train", "eval"):
        shutil.copy(sums / f"{name}.parquet", run / "dataset")
    (run / "config.toml").write_text(dump_config(config))
    plan = make_plan(plan_inputs(config, pq.read_metadata(sums / "train.parquet").num_rows))
    (run / "plan.json").write_text(json.dumps({"plan": asdict(plan)}))
    train(run, run / "training")

    tokenizer, rows = load_tokenizer(config.model), pq.read_table(sums / "eval.parquet").to_pylist()
    goes_on = config.model.model_copy(update={"adapter": str(run / "training" / "adapter")})

    def trained(*, in_4bit: bool) -> Any:
        keys = goes_on.model_copy(update={"load_in_4bit": in_4bit})
        return with_adapter(load_model(sums / "base", in_4bit=in_4bit), keys)

    policies = {
        "base": (
            load_model(sums / "base", in_4bit=True),
            {"as it was given": load_model(sums / "base")},
        ),
        "trained": (
            trained(in_4bit=True),
            {"saved": load_model(run / "training" / "model"), "over the original base": trained(in_4bit=False)},
        ),
    }
    found = {}
    for name, (codes, others) in policies.items():
        answers = _answers(codes, tokenizer, rows)
        found[f"{name}, 4 bits"] = _right(answers, tokenizer, rows), 0.0
        for how, plain in others.items():
            right = _right(_answers(plain, tokenizer, rows), tokenizer, rows)
            found[f"{name}, {how}"] = right, _distance(codes, plain, answers)
    return found


def _answers(model: Any, tokenizer: Any, rows: list[dict[str, str]]) -> Any:
    """Prompts of one length with the greedy answers. (B, L)"""
    import torch

    ids = torch.tensor([tokenizer(row["prompt"]).input_ids for row in rows])
    return model.generate(input_ids=ids, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(ids))


def _right(answers: Any, tokenizer: Any, rows: list[dict[str, str]]) -> float:
    said = tokenizer.batch_decode(answers, skip_special_tokens=True)
    return sum(text == row["prompt"] + row["answer"] for text, row in zip(said, rows, strict=True)) / len(rows)


def _distance(codes: Any, plain: Any, answers: Any) -> float:
    import torch

    prompt = answers.shape[1] - 4
    with torch.no_grad():
        both = [model(input_ids=answers).logits[:, prompt - 1 : -1].log_softmax(-1) for model in (codes, plain)]
    said = answers[:, prompt:, None]
    return float((both[0].gather(2, said) - both[1].gather(2, said)).abs().mean())


if __name__ == "__main__":
    main()
