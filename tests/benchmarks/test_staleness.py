"""The benchmark of sampling ahead: servers on a virtual clock, and differences paired by seed."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from benchmarks.command import RESULTS
from benchmarks.staleness import LENGTHS
from benchmarks.staleness_learning import VirtualServers, paired
from grpo_core.model.loading import load_model
from grpo_core.rollout.types import Request, Sampling
from tests.conftest import make_tokenizer
from tests.grpo_core.rollout.vllm_engine import plain_logprobs


@pytest.mark.slow
def test_what_virtual_servers_sample_is_by_the_weights_of_its_time_and_never_too_old(model_folder: Path) -> None:
    torch.manual_seed(0)
    model, prompt, sampling = load_model(model_folder), [3, 4, 5], Sampling(24, temperature=1.0)
    engine = VirtualServers(model, make_tokenizer(), 32, update_time=8.0)
    versions, ages = dict[int, Any](), set[int]()
    requests = [Request(prompt, 2, seed=100 * number) for number in range(8)]
    for _ in range(5):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        engine.sync_weights(model)
        versions[engine.version] = copy.deepcopy(model)
        requests += [Request(prompt, 2, seed=10_000 * engine.version + number) for number in range(4)]
        engine.begin(requests, sampling, 2)
        found = [each for step in engine.take(requests, sampling, 4) for each in step]
        assert len(found) == 4
        for _, group in found:
            for completion in group:
                assert completion.ages is not None
                ages |= {*completion.ages}
                plain = {
                    age: plain_logprobs(versions[engine.version - age], prompt + completion.ids)[len(prompt) - 1 :]
                    for age in {*completion.ages}
                }
                expected = [plain[age][place] for place, age in enumerate(completion.ages)]
                assert completion.logprobs == pytest.approx(expected, abs=1e-4)
        taken = {number for number, _ in found}
        requests = [request for number, request in enumerate(requests) if number not in taken]
        assert len(engine.begun) == len(requests)
    assert ages == {0, 1, 2}


def test_arms_are_compared_with_training_in_turn_of_the_same_seed() -> None:
    def arm(seed: int, most: int, *rewards: float) -> dict[str, object]:
        curve = [(100 * (place + 1), reward) for place, reward in enumerate(rewards)]
        return {
            "recipe": "r",
            "seed": seed,
            "max_staleness": most,
            "final": rewards[-1],
            "curve": curve,
            "staleness": 1,
        }

    trainings = [
        arm(0, 0, 0.0, 0.5, 1.0),
        arm(0, 2, 0.0, 0.95, 0.9),
        arm(1, 0, 0.0, 0.5, 1.0),
        arm(1, 2, 0.0, 0.1, 0.7),
    ]
    (found,) = paired(trainings)
    assert found["more_reward"] == pytest.approx([-0.1, -0.3])
    assert found["standard_error"] == pytest.approx(0.1)
    assert found["times_the_samples"] == [pytest.approx(200 / 300), None]  # the second never gets there


def test_the_page_on_servers_has_the_figures_of_the_simulation() -> None:
    rows = json.loads((RESULTS / "staleness-simulated.json").read_text())["simulated"]
    page = (RESULTS.parents[1] / "docs" / "how-to" / "sampling-ahead.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith(("| short", "| long tail", "| conversations"))]
    shown = [[int(cell) for cell in line.split("|")[2:-1]] for line in lines]
    paces = {(row["lengths"], row["max_staleness"]): row["updates_per_hour"] for row in rows if row["servers"] == 1}
    assert shown == [[round(paces[name, most]) for most in (0, 1, 2, 3, 4, 8)] for name in LENGTHS]


def test_the_pages_say_how_much_too_fast_the_plan_is() -> None:
    found = [json.loads((RESULTS / f"staleness-{name}.json").read_text()) for name in ("real", "real-2-servers")]
    excess = max(
        one["planned"]["updates_per_hour"][str(each["max_staleness"])] / each["updates_per_hour"] - 1
        for one in found
        for each in one["trainings"]
    )
    for page in (RESULTS.parents[1] / "docs" / "how-to" / "sampling-ahead.md", RESULTS.parent / "README.md"):
        assert f"up to {excess:.0%} too fast".replace("%", " %") in " ".join(page.read_text().split())


@pytest.mark.parametrize(("name", "before"), [("real", ""), ("real-2-servers", "two servers, ")])
def test_the_benchmark_page_has_the_real_trainings_beside_their_simulations(name: str, before: str) -> None:
    found = json.loads((RESULTS / f"staleness-{name}.json").read_text())
    planned = found["planned"]["updates_per_hour"]
    expected = {
        "measured": [each["updates_per_hour"] for each in found["trainings"]],
        "simulated with": [each["simulated_updates_per_hour"] for each in found["trainings"]],
        "what `grpo plan`": [planned[str(each["max_staleness"])] for each in found["trainings"]],
    }
    lines = (RESULTS.parent / "README.md").read_text().splitlines()
    for title, figures in expected.items():
        (line,) = (line for line in lines if line.startswith(f"| {before}{title}"))
        assert [int(cell) for cell in line.split("|")[2:-1]] == [*map(round, figures)]


@pytest.mark.parametrize(("name", "before"), [("learning", ", "), ("learning-sequence-mask", "")])
def test_the_benchmark_page_has_the_differences_that_were_measured(name: str, before: str) -> None:
    found = json.loads((RESULTS / f"staleness-{name}.json").read_text())
    page = (RESULTS.parent / "README.md").read_text()
    for recipe in ("quickstart", "maths", "smallest"):
        in_turn = [
            each["final"] for each in found["trainings"] if (each["recipe"], each["max_staleness"]) == (recipe, 0)
        ]
        cells = [f"{recipe}{before and f'{before}{len(in_turn)} seeds'}", f"{mean(in_turn):.3f}"]
        for pair in (each for each in found["paired"] if each["recipe"] == recipe):
            difference = f"{mean(pair['more_reward']):+.3f}".replace("+0.000", "0.000")
            cells.append(f"{difference} ± {pair['standard_error']:.3f}")
        assert f"| {' | '.join(cells)} |" in page
