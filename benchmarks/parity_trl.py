"""Trains the same rollouts by TRL's GRPOTrainer and by grpo_core: compares gradients, losses, advantages and weights.

    python -m benchmarks.parity_trl [--only WORD] [--output parity.json]      (needs requirements/bench.txt)

grpo_core samples and trains an epoch of small rollouts. TRL gets the sampled tokens and their log-probabilities instead
of generating, and the order in which a rollout's rows are trained. Everything else is each side's own: tokenization,
rewards, advantages, old and reference log-probabilities, normalisation, accumulation, clipping, AdamW, learning rate.
CPU, float32. Exits with 1 if a case exceeds its bounds and is not different on purpose.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from grpo_core.system.libraries import quiet_libraries

quiet_libraries()
os.environ.update(ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1")
warnings.simplefilter("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_pre_hook  # noqa: E402

from benchmarks.parity_cases import BASE, BY_DESIGN, CASES, brevity, digits, write_model, write_run  # noqa: E402
from grpo_core.data.order import Schedule, training_order  # noqa: E402
from grpo_core.planning.plan import Plan  # noqa: E402
from grpo_core.rollout.types import Completion, Finished, Rollout  # noqa: E402
from grpo_core.training.log import TrainingLog  # noqa: E402
from grpo_core.training.loop import advance  # noqa: E402
from grpo_core.training.session import load_session  # noqa: E402
from grpo_core.training.state import TrainingState  # noqa: E402

BOUND = 1e-5
WEIGHTS_BOUND = 1e-4
TRL: dict[str, Any] = {
    "reward_weights": [1.0, 0.5],
    "num_train_epochs": 1,
    "shuffle_dataset": False,
    "model_init_kwargs": {"dtype": "float32"},
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
NOTES = f"""
gradient, shared (the same, prompts computed once for a group), advantage: relative; loss: absolute; bound {BOUND:g}.
weights: how far apart they end, of how far they moved; bound {WEIGHTS_BOUND:g}.
Different on purpose (docs/explanation/trl.md), and made alike here: which rows a micro-step holds follows from the
run's seed (TRL gets that order); the sampling correction is on for every engine (here in cases named so, where TRL is
told that vLLM sampled); TRL's gradient checkpointing and bf16 are off."""


@dataclass
class Trained:
    """Results of a side: each update's gradient and loss, each rollout's advantages, and the final weights."""

    gradients: list[Tensor] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    advantages: list[Tensor] = field(default_factory=list)
    start: Tensor = field(default_factory=lambda: torch.empty(0))
    weights: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass(frozen=True)
class Kept:
    """Inputs for TRL: the plan, its prompts in order, each rollout, and the order in which its rows are trained."""

    plan: Plan
    rows: list[dict[str, Any]]
    rollouts: list[Rollout]
    order: list[Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description="Hold the trainer against TRL's.")
    parser.add_argument("--only", default="", help="the cases whose name has this in it")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    columns = ("updates", "gradient", "shared", "loss", "advantage", "weights")
    print(f"{'case':34}{''.join(f'{name:>10}' for name in columns)}  verdict")
    found = []
    for case in CASES:
        if arguments.only in case:
            found.append(compare(case))
            print(_line(found[-1]), flush=True)
    print(NOTES)
    if arguments.output:
        arguments.output.write_text(json.dumps({"bound": BOUND, "trl": "1.16.0", "cases": found}, indent=1) + "\n")
    sys.exit(any(figures["verdict"] == "BROKEN" for figures in found))


def _line(figures: dict[str, Any]) -> str:
    names = ("gradient", "gradient_shared_prompts", "loss", "advantages", "weights")
    values = "".join(f"{figures[name]:10.1e}" for name in names)
    return f"{figures['case']:34}{figures['updates']:10}{values}  {figures['verdict']}"


def compare(case: str) -> dict[str, Any]:
    """Compute the largest errors of a case over its updates, with prompts computed per completion and per group."""
    keys = {**BASE, **CASES[case]}
    silent = keys.pop("silent", False)
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name) / "model")
        write_run(Path(name), keys, silent)
        each, shared = (compared(Path(name), keys, share_prompts) for share_prompts in (False, True))
    figures = {name: max(each[name], shared[name]) for name in ("loss", "advantages", "weights")}
    figures |= {"gradient": each["gradient"], "gradient_shared_prompts": shared["gradient"]}
    within = all(value <= (WEIGHTS_BOUND if name == "weights" else BOUND) for name, value in figures.items())
    verdict = "ok" if within else "BROKEN"
    if case in BY_DESIGN:
        verdict = f"by design: {BY_DESIGN[case]}"
    return {"case": case, "updates": each["updates"], **figures, "verdict": verdict}


def compared(folder: Path, keys: dict[str, Any], share_prompts: bool) -> dict[str, float]:
    ours, kept = train_here(folder / "run", share_prompts)
    theirs = train_trl(folder / "model", keys, kept)

    def largest(name: str, *, relative: bool) -> float:
        pairs = zip(getattr(ours, name), getattr(theirs, name), strict=True)
        return max(float((a - b).norm() / (b.norm() if relative else 1)) for a, b in pairs)

    assert torch.equal(ours.start, theirs.start)
    return {
        "updates": len(ours.gradients),
        "gradient": largest("gradients", relative=True),
        "loss": largest("losses", relative=False),  # absolute, since it is near 0 whenever advantages cancel
        "advantages": largest("advantages", relative=True),
        "weights": float((ours.weights - theirs.weights).norm() / (theirs.weights - theirs.start).norm()),
    }


def train_here(run: Path, share_prompts: bool) -> tuple[Trained, Kept]:
    session = load_session(run)
    assert session.policy.packs and session.sampler is not None
    engine = session.sampler.engine
    session.policy.packs = share_prompts
    plan, seed, trained = session.plan, session.config.seed, Trained()
    rollouts: list[Rollout] = []
    generate = engine.generate

    def noisy(*arguments: Any) -> Iterator[list[Finished]]:
        """Add noise to the log-probabilities, as an engine of low precision would."""

        def disturbed(number: int, completions: list[Completion]) -> list[Completion]:
            # The seed does not depend on which completion ends first.
            noise = torch.Generator().manual_seed(1000 * len(rollouts) + number)
            off = [0.1 * torch.randn(len(c.ids), generator=noise) for c in completions]
            return [
                replace(c, logprobs=(torch.tensor(c.logprobs) + values).tolist())
                for c, values in zip(completions, off, strict=True)
            ]

        for step in generate(*arguments):
            yield [(number, disturbed(number, completions)) for number, completions in step]

    records: Any = mock.create_autospec(TrainingLog, instance=True)
    records.completions.side_effect = lambda step, rollout, samples: rollouts.append(rollout)
    state = TrainingState(tokens_per_pass=session.memory.tokens, entropy_coef=session.config.algorithm.entropy_coef)
    with recorded(session.model, trained), mock.patch.object(engine, "generate", noisy):
        while state.updates < plan.max_steps:
            state = advance(session, state, records)
            trained.losses.append(torch.tensor((state.unrecorded or {})["loss"]))
            state = replace(state, unrecorded=None)
    trained.advantages = [rollout.advantages for rollout in rollouts]
    rows = [session.prompts.rows[row] for n in range(plan.rollouts) for row in Schedule(plan, seed).prompts(n)]
    order = [torch.from_numpy(training_order(plan, seed, n)).flatten() for n in range(plan.rollouts)]
    return trained, Kept(plan, rows, rollouts, order)


def train_trl(model: Path, keys: dict[str, Any], kept: Kept) -> Trained:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer

    plan, trained = kept.plan, Trained()
    micro_steps: list[Tensor] = []

    class ToldWhatItSampled(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            rollout = kept.rollouts[len(trained.advantages)]
            assert prompt_ids == rollout.prompt_ids
            lengths = rollout.completion_lengths.tolist()
            sampled = rollout.completion_ids, rollout.sampling_logprobs
            return tuple([row[:n].tolist() for row, n in zip(rows, lengths, strict=True)] for rows in sampled)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            trained.advantages.append(output["advantages"])
            return output

        def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
            loss = super().compute_loss(*arguments, **keywords)
            micro_steps.append(loss.detach())
            return loss

    def in_our_order(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        rows = kept.order[len(trained.advantages) - 1]
        return {name: value[rows] if value.ndim else value for name, value in batch.items()}

    with tempfile.TemporaryDirectory() as output:
        trainer = ToldWhatItSampled(
            str(model),
            [digits, brevity],
            GRPOConfig(output, **keys, **TRL),
            Dataset.from_list(kept.rows),
        )
        trainer.use_vllm = keys["vllm_importance_sampling_correction"]
        trainer.remove_callback(transformers.PrinterCallback)
        shuffled = mock.patch.object(grpo_trainer, "shuffle_sequence_dict", in_our_order)
        with shuffled, recorded(trainer.model, trained):
            trainer.train()
    for update in range(plan.max_steps):
        count = len(list(plan.micro_steps(update)))
        trained.losses.append(torch.stack(micro_steps[:count]).sum())
        del micro_steps[:count]
    assert not micro_steps
    return trained


@contextmanager
def recorded(model: Any, trained: Trained) -> Iterator[None]:
    """Record the gradient of each optimizer step, after clipping, and the weights before the first and after the last
    step."""

    def flat(tensors: Sequence[Tensor | None]) -> Tensor:
        same = zip(tensors, model.parameters(), strict=True)
        return torch.cat([(torch.zeros_like(p) if t is None else t.detach()).double().flatten() for t, p in same])

    def keep(*_: Any) -> None:
        trained.gradients.append(flat([p.grad for p in model.parameters()]))

    trained.start = flat([*model.parameters()])
    hook = register_optimizer_step_pre_hook(keep)
    try:
        yield
    finally:
        hook.remove()
        AcceleratorState._reset_state(reset_partial_state=True)
    trained.weights = flat([*model.parameters()])


if __name__ == "__main__":
    main()
