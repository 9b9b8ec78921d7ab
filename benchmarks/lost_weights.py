"""Measures after how many updates a training notices that its engine gets no more weights; others must not be stopped.

    python -m benchmarks.lost_weights [ENGINE [PRECISION]] [--tiny]

For each engine, precision and learning rate: AdamW updates of a random Qwen2 of half a million parameters on one
rollout with random advantages, each followed by the hand-over and its check; once unchanged, once with a hand-over that
does nothing. Pairs of engine and precision are measured in a process each.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args
from unittest import mock

from benchmarks.command import parse
from tests.conftest import config_values, make_model, make_run

Name = Literal["copy", "vllm-shared", "vllm", "vllm-lora", "vllm-server", "vllm-server-lora"]
PRECISIONS = ("no", "bf16")
LEARNING_RATES = (1e-7, 1e-6, 1e-5, 1e-4)
UPDATES = 40
# At this size, vLLM on a CPU packs its layers, and only a reload replaces the packed copies.
MODEL: dict[str, Any] = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}


@dataclass(frozen=True)
class Row:
    """Result for a learning rate. `movement`: mean change of the probe's log-probabilities per update in the trainer;
    `drift`: largest drift while weights arrive. `stopped`, `stopped_lost`: update after which the training stopped
    while weights arrived, and when they did not; None: never."""

    engine: str
    precision: str
    learning_rate: float
    movement: float
    drift: float
    stopped: int | None
    stopped_lost: int | None


def measure(engine: Name, precision: str, folder: Path, updates: int = UPDATES) -> list[Row]:
    """Measure one row per learning rate."""
    import torch

    from grpo_core.errors import TrainingError
    from grpo_core.training.batch import update_batch
    from grpo_core.training.optimizer import make_optimizer
    from grpo_core.training.roll_out import roll_out
    from grpo_core.training.session import load_session
    from grpo_core.training.state import TrainingState
    from grpo_core.training.update import update
    from grpo_core.training.weight_sync import probe_logprobs, sync_weights

    model = make_model(folder / "model", initializer_range=0.02, tie_word_embeddings=True, **MODEL)
    keys: dict[str, Any] = {"mixed_precision": precision, "use_peft": "lora" in engine, "lora_r": 8}
    kind = engine.removesuffix("-lora").removesuffix("-shared").replace("copy", "transformers")
    values = config_values(model, folder, engine=kind, vllm_server_timeout=600.0, **keys)
    values["rewards"] = [{"function": "tests.grpo_core.training.test_loop:parity"}]
    run = make_run(folder / "run", values)
    with _engine_made_as(engine, run):
        session = load_session(run)
        sampler, probe = session.engine, session.probe
        assert sampler is not None and probe is not None
        progress = TrainingState(tokens_per_pass=100)
        rollout, *_ = roll_out(session, 0, progress)
        generator = torch.Generator().manual_seed(0)
        rollout = replace(rollout, advantages=torch.randn(len(rollout.advantages), generator=generator))
        batch = update_batch([(rollout, 0)], session.plan, session.config)
        trained = [parameter for parameter in session.model.parameters() if parameter.requires_grad]
        start = [parameter.detach().clone() for parameter in trained]

        def train(learning_rate: float) -> tuple[int | None, float, float]:
            """Train; returns the update after which it stops, mean movement per update, and largest drift."""
            optimizer = make_optimizer(session.model, session.config.train)
            at_rate = replace(session, optimizer=optimizer, learning_rate=lambda updates: learning_rate)
            movements: list[float] = []
            drifts, before = [0.0], probe_logprobs(session).trainer
            for number in range(1, updates + 1):
                update(at_rate, batch, replace(progress, updates=number - 1))
                try:
                    drifts.append(sync_weights(at_rate, replace(progress, updates=number)))
                except TrainingError:
                    return number, sum(movements) / max(len(movements), 1), max(drifts)
                after = probe_logprobs(session).trainer
                movements.append((after - before).abs().mean().item())
                before = after
            return None, sum(movements) / updates, max(drifts)

        def begin() -> None:
            with torch.no_grad():
                torch._foreach_copy_(trained, start)
            session.policy.refresh()
            sampler.sync_weights(session.policy.model)
            probe.noticed = probe.reference = None
            probe.compare(probe_logprobs(session))

        rows = []
        for learning_rate in LEARNING_RATES:
            begin()
            stopped, movement, drift = train(learning_rate)
            begin()
            with mock.patch.object(sampler, "sync_weights", lambda model: "lost"):
                stopped_lost, _, _ = train(learning_rate)
            rows.append(Row(engine, precision, learning_rate, movement, drift, stopped, stopped_lost))
        sampler.close()
    return rows


@contextmanager
def _engine_made_as(engine: Name, run: Path) -> Iterator[None]:
    """Make `load_session` use this engine in the block; except for vllm-shared, the engine has its own copy of the
    weights."""
    from grpo_core.config.files import load_config
    from grpo_core.rollout.transformers_engine import TransformersEngine
    from grpo_core.training import session

    if engine == "copy":

        class Copying(TransformersEngine):
            def sync_weights(self, model: Any) -> str:
                self.model = copy.deepcopy(model)
                return "copied"

        def make(config: Any, path: Any, model: Any, tokenizer: Any, max_length: int) -> Copying:
            return Copying(copy.deepcopy(model), tokenizer)

        with mock.patch.object(session, "make_engine", make):
            yield
    elif engine.startswith("vllm-server"):
        from tasks.processes.vllm_servers import servers
        from tasks.stages.run import Context

        context = Context(load_config(run / "config.toml"), run, run)
        with servers(context, logging.getLogger()) as addresses, mock.patch.dict(os.environ, addresses):
            yield
    else:
        from grpo_core.rollout.vllm import colocated_engine as vllm

        share: Callable[..., bool] = vllm.share_memory if engine == "vllm-shared" else lambda copies, model: False
        with mock.patch.object(vllm, "share_memory", share):
            yield


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("engine", nargs="?", choices=get_args(Name), help="default: each")
    parser.add_argument("precision", nargs="?", choices=PRECISIONS, help="default: each")
    options = parse(parser)
    if options.precision is None:
        print("| engine | precision | learning rate | movement per update | largest drift | stopped | stopped, lost |")
        print("|---|---|---|---|---|---|---|", flush=True)
        engines, further = [options.engine] if options.engine else get_args(Name), ["--tiny"] * options.tiny
        for pair in itertools.product(engines, PRECISIONS):
            subprocess.run([sys.executable, "-m", "benchmarks.lost_weights", *pair, *further], check=True)
        return
    with tempfile.TemporaryDirectory() as scratch:
        for row in measure(options.engine, options.precision, Path(scratch), 2 if options.tiny else UPDATES):
            cells = [f"{cell:.1e}" if isinstance(cell, float) else str(cell) for cell in asdict(row).values()]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
