"""A training on conversations that a real vLLM server samples ahead, on the CPU; the server is killed on the way."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.beside_server import found_beside_server
from tests.grpo_core.environments.talking import let_any_text_call, make_model, make_talking_run, talking_values
from tests.grpo_core.rollout.vllm_engine import plain_logprobs
from tests.serving import free_ports

STALENESS, UPDATES = 4, 6

pytestmark = pytest.mark.e2e


def live(folder: Path) -> None:
    """Train the run in FOLDER and kill its server after the third generation batch, while more is being sampled.
    What was sampled goes to FOLDER/found, beside what plain passes by the weights of then give."""
    import torch

    from grpo_core.model.loading import load_model
    from grpo_core.training import loop, session

    let_any_text_call(patch := pytest.MonkeyPatch())
    engines, weights, found = list[Any](), dict[int, Any](), list[dict[str, Any]]()
    make_engine, roll_out = session.make_engine, loop.roll_out

    def recording(config: Any, path: Any, model: Any, tokenizer: Any, max_length: int) -> Any:
        engine: Any = make_engine(config, path, model, tokenizer, max_length)
        sync = engine.sync_weights

        def sync_weights(model: Any) -> str:
            how = sync(model)
            weights[engine.version] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            return how

        engine.sync_weights = sync_weights
        engines.append(engine)
        return engine

    def recorded(session: Any, index: int, state: Any) -> Any:
        batch = roll_out(session, index, state)
        for sample in batch[1]:
            said = sample.completion
            found.append(
                {
                    "batch": index,
                    "version": engines[0].version,
                    "prompt": sample.prompt_ids,
                    "turns": sample.said.turns,
                    **{name: getattr(said, name) for name in ("ids", "mask", "ages", "logprobs")},
                }
            )
        if index == 2:
            assert session.sampler.lookahead.begun
            os.killpg(int((folder / "pid").read_text()), signal.SIGKILL)
        return batch

    patch.setattr(session, "make_engine", recording)
    patch.setattr(loop, "roll_out", recorded)
    result = loop.train(folder / "run", folder / "run" / "training")
    model = load_model(folder / "model")
    for sample in found:
        passes = {}
        for version in {sample["version"] - age for age in (0, *sample["ages"])}:
            model.load_state_dict(weights[version])
            with torch.no_grad():
                row = plain_logprobs(model, sample["prompt"] + sample["ids"])
            passes[version] = row[len(sample["prompt"]) - 1 :]
        sample["by_age"] = [passes[sample["version"] - age][t] for t, age in enumerate(sample["ages"])]
        sample["by_newest"] = passes[sample["version"]]
    counts = {name: result[name] for name in ("counted", "planned")}
    (folder / "found").write_text(json.dumps({**counts, "samples": found}))


def test_conversations_go_on_with_new_weights_and_survive_the_death_of_their_server(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", hidden_size=64, intermediate_size=64)
    (port,) = free_ports(1)
    values = talking_values(model, engine="vllm-server", vllm_server_timeout=600.0)
    values["rollout"] |= {"max_staleness": STALENESS, "vllm_server_base_urls": [f"http://127.0.0.1:{port}"]}
    values["train"]["max_steps"] = UPDATES
    config = make_talking_run(tmp_path / "run", values) / "config.toml"
    found = found_beside_server(__name__, config, port, tmp_path)
    assert found["counted"] == found["planned"]
    samples = found["samples"]
    assert {sample["batch"] for sample in samples} == {*range(UPDATES)}
    assert max(sample["turns"] for sample in samples) > 1

    def off(sample: dict[str, Any], by: str) -> float:
        triples = zip(sample["logprobs"], sample[by], sample["mask"], strict=True)
        return max(abs(sampled - plain) for sampled, plain, own in triples if own)

    assert max(off(sample, "by_age") for sample in samples) < 1e-4
    mixed = [sample for sample in samples if len({*sample["ages"]}) > 1]
    assert mixed, "a conversation has turns by several weights"
    assert min(off(sample, "by_newest") for sample in mixed) > 1e-3
    assert 1 < max(sample["ages"][0] for sample in samples) <= STALENESS
