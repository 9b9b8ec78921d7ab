"""What a real vLLM server samples ahead, on the CPU, conversations of a training too, when it gets other weights, is
killed or comes back."""

from __future__ import annotations

import copy
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.beside_server import found_beside_server, served_run
from tests.grpo_core.environments.talking import let_any_text_call, make_model, make_talking_run, talking_values
from tests.grpo_core.rollout.vllm_engine import plain_logprobs
from tests.serving import free_ports

LENGTH = 480  # tokens of a completion: a second or more

pytestmark = pytest.mark.e2e


def live(folder: Path) -> None:
    """Completions that are sampled while the weights change and the server dies, beside plain passes; written to
    FOLDER/found."""
    import torch

    from grpo_core.config.files import load_config
    from grpo_core.data.prompts import load_tokenizer
    from grpo_core.model.loading import load_model
    from grpo_core.rollout.loading import make_engine
    from grpo_core.rollout.types import Completion, Request, Sampling

    config = load_config(folder / "run" / "config.toml")
    model, tokenizer = load_model(config.model.name_or_path), load_tokenizer(config.model)
    engine: Any = make_engine(config, config.model.name_or_path, model, tokenizer, 512)
    sampling = Sampling(LENGTH, temperature=0.7)
    versions = {engine.version: copy.deepcopy(model)}

    def change_weights() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        engine.sync_weights(model)
        versions[engine.version] = copy.deepcopy(model)

    def left(requests: list[Request]) -> int:
        return sum(not begun.answer.done() for begun in engine.begun.values())

    def differences(request: Request, completion: Completion) -> list[float]:
        """How far each token's log-probability is from that by the weights that its age names."""
        ids, found = request.prompt_ids + completion.ids, completion.logprobs
        plain = {
            version: plain_logprobs(weights, ids, sampling.temperature)[len(request.prompt_ids) - 1 :]
            for version, weights in versions.items()
        }
        ages = completion.ages or []
        return [abs(found[t] - plain[engine.version - ages[t]][t]) for t in range(len(found))]

    def measured(first: int, changes: int) -> dict[str, Any]:
        """Requests that are begun, and `changes` of the weights, each while all are being sampled."""
        requests = [Request([3 + i, 4, 5], 4, seed=first + 1000 * i) for i in range(6)]
        engine.begin(requests, sampling, 8)
        for _ in range(changes):
            busy.wait(0.2)
            assert left(requests) == len(requests)
            change_weights()
        taken = [found for step in engine.take(requests, sampling, 6) for found in step]
        return {
            "numbers": sorted(number for number, _ in taken),
            "ages": [each.ages for _, group in taken for each in group],
            "differences": [differences(requests[number], each) for number, group in taken for each in group],
            "ids": [each.ids for _, group in sorted(taken) for each in group],
        }

    busy = threading.Event()
    found = {"undisturbed": measured(0, 0), "again": measured(0, 0), "changed": measured(50_000, 2)}
    requests = [Request([3 + i, 4, 5], 4, seed=90_000 + 1000 * i) for i in range(6)]
    engine.begin(requests, sampling, 1)
    busy.wait(0.5)
    os.killpg(int((folder / "pid").read_text()), signal.SIGKILL)
    change_weights()
    taken = [each for step in engine.take(requests, sampling, 6) for each in step]
    found["killed"] = [max(differences(requests[number], each)) for number, group in taken for each in group]
    assert not engine.begun
    engine.close()
    (folder / "found").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("live")
    config, [port] = served_run(folder, max_staleness=8)
    return found_beside_server(live, config, port, folder)


def test_completions_go_on_with_new_weights_and_each_token_is_by_those_that_its_age_names(
    found: dict[str, Any],
) -> None:
    changed = found["changed"]
    assert changed["numbers"] == [*range(6)]
    for ages in changed["ages"]:
        assert ages[0] == 2
        assert sorted(ages, reverse=True) == ages
    assert {0, 1, 2} in [{*ages} for ages in changed["ages"]]  # some end before the weights change twice
    assert max(difference for row in changed["differences"] for difference in row) < 1e-4


def test_what_is_begun_says_what_a_seed_says(found: dict[str, Any]) -> None:
    assert found["undisturbed"]["ids"] == found["again"]["ids"]
    assert {age for ages in found["undisturbed"]["ages"] for age in ages} == {0}


def test_what_is_begun_survives_the_servers_death_with_the_weights_of_then(found: dict[str, Any]) -> None:
    assert len(found["killed"]) == 24
    assert max(found["killed"]) < 1e-4


STALENESS, UPDATES = 4, 6


def live_conversations(folder: Path) -> None:
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
    found = found_beside_server(live_conversations, config, port, tmp_path)
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
