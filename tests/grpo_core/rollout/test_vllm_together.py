"""Two processes of a training that share one vLLM engine, each with half of every weight, for real on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.command import python_path
from grpo_core.rollout.types import Request, Sampling
from tests.conftest import config_values, make_model, make_run
from tests.grpo_core.rollout.sampling import sampled
from tests.grpo_core.rollout.vllm_engine import PACKED, plain_logprobs, start
from tests.grpo_core.training.launching import TWO_PROCESSES

pytestmark = pytest.mark.served

ROOT = Path(__file__).parents[3]
REQUESTS = [  # of each process
    [Request([3, 4, 5], 2, seed=10), Request([6], 1, seed=20)],
    [Request([7, 8], 3, seed=30)],
]
SAMPLING = Sampling(5, temperature=0.7)
SCORED = [[3, 4, 5, 6], [9, 8]]


def sample_together(run: str, other: str) -> None:
    """One of two processes; it writes RUN/PROCESS.json."""
    from accelerate import PartialState

    from grpo_core.model.loading import load_model

    own = PartialState(cpu=True).process_index
    engine, model, _ = start(Path(run))

    def answers() -> list[Any]:
        return [[answer.ids, answer.logprobs] for answer in sampled(engine.generate(REQUESTS[own], SAMPLING))]

    found: dict[str, Any] = {"first": answers()}
    if own == 0:  # as when a reward fails; the other process goes on
        steps = engine.generate(REQUESTS[own], SAMPLING)
        next(steps)
        steps.close()
        found["beside one that stops"] = found["first"]
    else:
        found["beside one that stops"] = answers()
    found["scores"] = engine.compute_logprobs(SCORED)
    model.load_state_dict(load_model(other).state_dict())
    found["how"] = engine.sync_weights(model)
    found["synced scores"] = engine.compute_logprobs(SCORED)
    found["synced"] = answers()
    engine.close()
    (Path(run) / f"{own}.json").write_text(json.dumps(found))


@pytest.mark.e2e
def test_processes_that_share_an_engine_get_their_own_completions_by_the_weights_last_synced(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    options = {"max_position_embeddings": 512, **PACKED}
    first = make_model(tmp_path / "first", initializer_range=0.2, **options)
    other = make_model(tmp_path / "other", initializer_range=0.3, **options)
    keys = {"engine": "vllm", "num_processes": 2, "vllm_tensor_parallel_size": 2, "per_device_train_batch_size": 4}
    run = make_run(tmp_path / "run", config_values(first, tmp_path, **keys))
    code = "from tests.grpo_core.rollout.test_vllm_together import sample_together; "
    (tmp_path / "child.py").write_text(code + f"sample_together({str(run)!r}, {str(other)!r})")
    done = subprocess.run(
        [sys.executable, *TWO_PROCESSES, str(tmp_path / "child.py")],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": python_path(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    models = {path: AutoModelForCausalLM.from_pretrained(path).eval() for path in (first, other)}
    for own, requests in enumerate(REQUESTS):
        found = json.loads((run / f"{own}.json").read_text())
        assert found["how"] == "copied"
        assert found["beside one that stops"] == found["first"]
        for name, scores, model in (("first", "scores", models[first]), ("synced", "synced scores", models[other])):
            prompts = [request.prompt_ids for request in requests for _ in range(request.num_completions)]
            for prompt, (ids, logprobs) in zip(prompts, found[name], strict=True):
                expected = plain_logprobs(model, prompt + ids, SAMPLING.temperature)[len(prompt) - 1 :]
                assert logprobs == pytest.approx(expected, abs=1e-4)
            for ids, values in zip(SCORED, found[scores], strict=True):
                assert values == pytest.approx(plain_logprobs(model, ids), abs=1e-4)
