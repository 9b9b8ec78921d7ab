"""Measures after how many updates a training notices that weights do not reach its engine; others must not be stopped.

    python -m benchmarks.lost_weights [ENGINE [PRECISION]] [--tiny]

For each engine, precision and learning rate: AdamW updates of a random Qwen2 of a million parameters on one rollout
with random advantages, each followed by the hand-over and its checks; once unchanged, and once per loss that is planted
on the way. `copy` is a simulated engine without checksums: the probe of log-probabilities alone. Pairs of engine and
precision are measured in a process each.
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
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args
from unittest import mock

from benchmarks.command import parse
from benchmarks.planted_losses import LOSSES, Transport, planted
from tests.conftest import config_values, make_model, make_run
from tests.held import held

Name = Literal["copy", "vllm", "vllm-lora", "vllm-server", "vllm-server-lora"]
PRECISIONS = ("no", "bf16")
LEARNING_RATES = (1e-6, 1e-5)
UPDATES, UPDATES_LOST = 40, 16  # while all weights arrive, and at most with each loss
RESTORED_SECONDS = 60.0  # in which a server whose weights were lost has got them again
# At this size, vLLM on a CPU packs its layers, and only a reload replaces the packed copies.
MODEL: dict[str, Any] = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}


@dataclass(frozen=True)
class Row:
    """Result of a training. `loss`: what was planted; "" if all weights arrived. `lost`: first update after which
    something other than what was sent arrived; `noticed`: the update after which the training stopped; None: never.
    `by`: what noticed it, "checksums" or "probe". `movement`: mean change of the probe's log-probabilities per update
    in the trainer; `drift`: largest drift. Both until the training stopped."""

    engine: str
    precision: str
    learning_rate: float
    loss: str
    lost: int | None
    noticed: int | None
    by: str
    movement: float
    drift: float


def measure(
    engine: Name,
    precision: str,
    folder: Path,
    updates: int = UPDATES,
    updates_lost: int = UPDATES_LOST,
    learning_rates: Sequence[float] = LEARNING_RATES,
    losses: Sequence[str] = tuple(LOSSES),
) -> list[Row]:
    """Measure a training per learning rate in which all weights arrive, and one for each of the losses."""
    import torch

    from grpo_core.errors import EngineError, TrainingError
    from grpo_core.training.batch import update_batch
    from grpo_core.training.optimizer import make_optimizer
    from grpo_core.training.roll_out import roll_out
    from grpo_core.training.session import load_session
    from grpo_core.training.state import TrainingState
    from grpo_core.training.update import update
    from grpo_core.training.weight_sync import begin_probing, probe_logprobs, sync_weights

    model = make_model(folder / "model", initializer_range=0.02, **MODEL)
    keys: dict[str, Any] = {"mixed_precision": precision, "use_peft": "lora" in engine, "lora_r": 8}
    kind = engine.removesuffix("-lora").replace("copy", "transformers")
    values = config_values(model, folder, engine=kind, vllm_server_timeout=600.0, **keys)
    values["rewards"] = [{"function": "tests.grpo_core.training.test_loop:parity"}]
    run = make_run(folder / "run", values)
    with _engine_made_as(engine, run):
        session = load_session(run)
        assert session.sampler is not None
        sampler, sampling, probe = session.sampler, session.sampler.engine, session.sampler.probe
        begin_probing(session, sampler)
        progress = TrainingState(tokens_per_pass=100)
        rollout, *_ = roll_out(session, 0, progress)
        generator = torch.Generator().manual_seed(0)
        rollout = replace(rollout, advantages=torch.randn(len(rollout.advantages), generator=generator))
        batch = update_batch([(rollout, 0)], session.plan, session.config)
        trained = [parameter for parameter in session.model.parameters() if parameter.requires_grad]
        start = [parameter.detach().clone() for parameter in trained]
        transport = Transport()

        def train(learning_rate: float, loss: str) -> Row:
            with torch.no_grad():
                torch._foreach_copy_(trained, start)
            session.policy.refresh()
            transport.loss = None
            _await_servers(sampling)
            transport.first, transport.has_lost = {}, False
            sampling.sync_weights(session.policy.model)
            probe.noticed = probe.reference = None
            before = probe_logprobs(session, sampler)
            probe.compare(before)
            transport.loss = LOSSES.get(loss)
            optimizer = make_optimizer(session.model, session.config.train)
            at_rate = replace(session, optimizer=optimizer, learning_rate=lambda updates: learning_rate)
            lost, noticed, by, movements, drifts = None, None, "", [0.0], [0.0]
            for number in range(1, 1 + (updates_lost if loss else updates)):
                update(at_rate, batch, replace(progress, updates=number - 1))
                try:
                    drifts.append(sync_weights(at_rate, sampler, replace(progress, updates=number)))
                except (EngineError, TrainingError) as error:
                    noticed, by = number, "checksums" if isinstance(error, EngineError) else "probe"
                lost = number if lost is None and transport.has_lost else lost
                if noticed:
                    break
                after = probe_logprobs(session, sampler)
                movements.append((after.trainer - before.trainer).abs().mean().item())
                before = after
            movement = sum(movements) / max(1, len(movements) - 1)
            return Row(engine, precision, learning_rate, loss, lost, noticed, by, movement, max(drifts))

        with planted(sampling, transport):
            rows = [train(learning_rate, loss) for learning_rate in learning_rates for loss in ("", *losses)]
            transport.loss = None
            _await_servers(sampling)
        sampling.close()
    return rows


def _await_servers(engine: Any) -> None:
    """Wait until a server that was left out has got the weights."""
    until = time.monotonic() + RESTORED_SECONDS
    while any(server.problem for server in getattr(engine, "servers", ())):
        if time.monotonic() > until:
            raise TimeoutError(f"{engine.servers[0].url} is not back: {engine.servers[0].problem}")
        time.sleep(0.05)


@contextmanager
def _engine_made_as(engine: Name, run: Path) -> Iterator[None]:
    """Make `load_session` use this engine in the block, with its own copy of the weights."""
    from grpo_core.config.files import load_config
    from grpo_core.rollout.transformers_engine import TransformersEngine
    from grpo_core.training import session

    if engine == "copy":

        class Copying(TransformersEngine):
            arriving: Any = staticmethod(lambda weights: weights)

            def sync_weights(self, model: Any) -> str:
                self.model.load_state_dict(self.arriving(model.state_dict()), strict=False)
                return "copied"

        def make(config: Any, path: Any, model: Any, tokenizer: Any, max_length: int) -> Copying:
            return Copying(copy.deepcopy(model), tokenizer)

        with mock.patch.object(session, "make_engine", make):
            yield
    elif engine.startswith("vllm-server"):
        from tasks.processes.vllm_servers import servers
        from tasks.stages.run import Context

        context = Context(load_config(run / "config.toml"), run, run)
        with servers(context, logging.getLogger()) as addresses, held(os.environ, addresses):
            yield
    else:
        from grpo_core.rollout.vllm import colocated_engine as vllm

        with mock.patch.object(vllm, "share_memory", lambda copies, model: False):
            yield


def table(rows: Sequence[Row]) -> str:
    """Return the results of one engine and precision as a Markdown table."""
    rates = [*dict.fromkeys(row.learning_rate for row in rows)]
    lines = [f"| {rows[0].engine}, {rows[0].precision} | {' | '.join(f'{rate:g}' for rate in rates)} |"]
    lines += ["|---" * (1 + len(rates)) + "|"]
    for loss in dict.fromkeys(row.loss for row in rows):
        found = [_cell(next(row for row in rows if (row.learning_rate, row.loss) == (rate, loss))) for rate in rates]
        lines.append(f"| {loss or 'all weights arrive: movement per update, largest drift'} | {' | '.join(found)} |")
    return "\n".join(lines) + "\n"


def _cell(row: Row) -> str:
    if not row.loss:
        stopped = f"**stopped after {row.noticed} by the {row.by}**, " if row.noticed else ""
        return f"{stopped}{row.movement:.0e}, {row.drift:.0e}"
    if row.lost is None:
        return "nothing was lost" if row.noticed is None else f"**stopped after {row.noticed}, nothing was lost**"
    late = f", lost in {row.lost}" if row.lost > 1 else ""
    return (f"{row.noticed}, {row.by}" if row.noticed else "never") + late


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("engine", nargs="?", choices=get_args(Name), help="default: each")
    parser.add_argument("precision", nargs="?", choices=PRECISIONS, help="default: each")
    options = parse(parser)
    if options.precision is None:
        print("In a cell: the update after which it was noticed, of at most 16, and by what.", flush=True)
        engines, further = [options.engine] if options.engine else get_args(Name), ["--tiny"] * options.tiny
        for pair in itertools.product(engines, PRECISIONS):
            subprocess.run([sys.executable, "-m", "benchmarks.lost_weights", *pair, *further], check=True)
        return
    cut_down: dict[str, Any] = {"updates": 2, "updates_lost": 2, "learning_rates": (1e-5,)} if options.tiny else {}
    with tempfile.TemporaryDirectory() as scratch:
        print("\n" + table(measure(options.engine, options.precision, Path(scratch), **cut_down)), flush=True)


if __name__ == "__main__":
    main()
