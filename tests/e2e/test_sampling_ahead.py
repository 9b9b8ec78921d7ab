"""What is being sampled when a real vLLM server gets other weights, is killed or comes back, on the CPU."""

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
from tests.grpo_core.rollout.vllm_engine import plain_logprobs

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
    return found_beside_server(__name__, config, port, folder)


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
