"""What pages say of curricula, the sampling correction, sampling ahead, decisions, the best-looking of many versions,
sweeps by seeds and the memory of a sharded update follows from the recorded trainings and simulations."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from scipy import stats

from benchmarks import staleness_learning
from benchmarks.command import RESULTS, ROOT
from benchmarks.curriculum import LAST, paired, table
from benchmarks.decisions import groups_table
from benchmarks.looks import p_values_of, promoted
from benchmarks.seeds import LAWS, shares
from benchmarks.sharded_memory import GPUS, MODELS, forecast, simulated
from benchmarks.staleness import LENGTHS
from grpo_core.model.loading import load_model
from grpo_core.planning.memory import GIB
from grpo_core.planning.shapes import model_shape
from grpo_core.rollout.types import Request, Sampling
from tests.conftest import make_tokenizer
from tests.grpo_core.rollout.vllm_engine import plain_logprobs
from tests.qwen import QWEN


def _record(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize(
    ("name", "page"), [("curriculum-most", "docs/how-to/curriculum.md"), ("curriculum", "benchmarks/README.md")]
)
def test_the_page_shows_the_table_of_the_record(name: str, page: str) -> None:
    record = _record(name)
    assert json.loads(json.dumps(paired(record["trainings"]))) == record["paired"]
    assert table(record) in (ROOT / page).read_text()


def test_intervals_and_p_values_are_those_of_a_paired_t_test_with_holms_correction() -> None:
    record = _record("curriculum-most")
    ends = {
        (each["arm"], each["seed"]): mean(reward for _, reward in each["curve"][-LAST:]) for each in record["trainings"]
    }
    seeds = sorted({seed for _, seed in ends})
    p_values = []
    for found in record["paired"]:
        test = stats.ttest_rel(*([ends[arm, seed] for seed in seeds] for arm in (found["arm"], "none")))
        assert found["p_value"] == pytest.approx(test.pvalue)
        assert found["interval"] == pytest.approx([*test.confidence_interval(0.95)])
        p_values.append(test.pvalue)
    least, middle, most = sorted(p_values)
    corrected = [3 * least, max(3 * least, 2 * middle), max(3 * least, 2 * middle, most)]
    assert sorted(found["p_value_after_holm"] for found in record["paired"]) == pytest.approx(corrected)


SHOWN = ("own completions", "none", "token_truncate", "sequence_truncate", "sequence_mask")


def test_the_benchmark_page_has_the_cosines_and_lengths_that_were_measured() -> None:
    page = (RESULTS.parent / "README.md").read_text()
    for row in json.loads((RESULTS / "correction.json").read_text())["rows"]:
        cells = [f"{row['cosine'][name]:.2f}, {row['length_along'][name]:.2f}" for name in SHOWN]
        assert f"| {row['length']:,} | {row['kl_per_token']:g} | {' | '.join(cells)} |" in page


@pytest.mark.slow
def test_what_virtual_servers_sample_is_by_the_weights_of_its_time_and_never_too_old(model_folder: Path) -> None:
    torch.manual_seed(0)
    model, prompt, sampling = load_model(model_folder), [3, 4, 5], Sampling(24, temperature=1.0)
    engine = staleness_learning.VirtualServers(model, make_tokenizer(), 32, update_time=8.0)
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
    (found,) = staleness_learning.paired(trainings)
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


@pytest.mark.slow
def test_groups_of_prompts_err_as_little_as_stated_where_their_prompts_do_not() -> None:
    """Of 40 sweeps, with 2.5 % and 5 % allowed: none stops an arm, and at most six of 40 candidates are better."""
    rows = {label: [float(cell.rstrip(" %")) for cell in cells] for label, *cells in groups_table(40)}
    assert all(stopped == 0 and better <= 15 for _, stopped, _, better in rows.values())
    stopped, _, better, _ = rows["10 prompts per group"]
    assert stopped > 40 and better > 15
    one, other = rows["each prompt by itself"][::2], rows["each prompt by itself"][1::2]
    assert one == other


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 5, 20])
def test_the_best_looking_of_many_versions_that_are_no_better_is_rarely_promoted(count: int) -> None:
    found = promoted(*p_values_of(400, count, 200, 0.4, gain=0.0))
    shares = {name: float(of_each.any(axis=1).mean()) for name, of_each in found.items()}
    assert shares["best-looking, counted by its place"] <= shares["all tried"] < 0.08  # 0.05, and three standard errors
    assert count == 1 or shares["best-looking, counted as attempt 1"] > 0.05 * (1 + count / 20)


def test_the_page_on_promotions_has_the_table_that_was_simulated() -> None:
    page = (ROOT / "docs" / "how-to" / "promote.md").read_text()
    result = (RESULTS / "looks.md").read_text()
    shown = [row.partition(": ")[2].partition(" | ")[2] for row in result.splitlines() if "by its place" in row]
    shares = [float(cell.removesuffix(" % ")) for row in shown[:3] for cell in row.rstrip("|").split("| ")]
    assert len(shown) == 9 and all(share <= 5 for share in shares)
    for row in (shown[0], shown[1], shown[4], shown[6]):
        assert row in page


@pytest.mark.slow
def test_intervals_by_seeds_hold_for_normal_gains_and_fail_where_trainings_collapse() -> None:
    hold, kept = shares(*LAWS["normal"], settings=3, seeds=3, trials=400)
    assert min(hold, kept) > 0.91  # 0.95, less three standard errors
    hold, kept = shares(*LAWS["10 % collapse"], settings=3, seeds=5, trials=400)
    assert hold < 0.5 and kept > 0.91


def test_the_page_on_sweeps_has_the_shares_that_were_simulated() -> None:
    page = " ".join((ROOT / "docs" / "how-to" / "sweep.md").read_text().split())
    result = (RESULTS / "seeds.md").read_text()
    hold, kept = (
        [cell.strip() for cell in line.split("|")[2:5]] for line in result.splitlines() if "| 10 % collapse" in line
    )
    assert f"hold in {hold[0]} of sweeps with two seeds, in {hold[2]} with five" in page
    assert f"best setting is still kept in {kept[0]} and {kept[2]}" in page


PROCESSES = 8
FLOAT = 4  # bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recomputed", "offload"),
    [
        pytest.param(False, "none", marks=pytest.mark.e2e),
        pytest.param(True, "none", marks=pytest.mark.e2e),
        (True, "optimizer"),
    ],
    ids=["kept", "recomputed", "moments elsewhere"],
)
def test_an_update_of_7b_takes_what_is_forecast(recomputed: bool, offload: str) -> None:
    """The layers of Qwen2.5-7B, four of them, on eight processes: never less, and at most a tenth more."""
    model = {**QWEN["7B"], "num_hidden_layers": 4}
    found = simulated(model, PROCESSES, recomputed=recomputed, offload=offload)
    expected = forecast(model, PROCESSES, recomputed=recomputed, offload=offload)
    assert found["Total"] <= expected <= 1.1 * found["Total"]
    share = FLOAT * model_shape(model).parameters / PROCESSES
    sizes = {"Sharded Param": share, "Sharded Grad": share, "OptState": 2 * share * (offload == "none")}
    assert {kind: found[kind] for kind in sizes} == pytest.approx(sizes, rel=1e-3, abs=1e4)


def _table(first: str) -> dict[tuple[str, int], list[str]]:
    """Rows of the page's table whose heading begins so: size and number of GPUs, and the figures in GiB."""
    _, _, rest = (ROOT / "benchmarks" / "README.md").read_text().partition(f"{first} |")
    lines = rest.split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {(size, int(gpus)): figures for size, gpus, *figures in cells}


@pytest.mark.parametrize(
    ("table", "numbers", "kinds"),
    [
        ("| Qwen2.5 | GPUs | simulated | estimated", GPUS, [(False, "none"), (True, "none")]),
        ("| Qwen2.5 | GPUs | simulated, recomputing and offloaded", (8,), [(True, "optimizer")]),
    ],
    ids=["all on the GPU", "moments elsewhere"],
)
def test_the_page_s_simulations_are_at_most_a_tenth_below_the_forecast_and_never_above(
    table: str, numbers: tuple[int, ...], kinds: list[tuple[bool, str]]
) -> None:
    rows = _table(table)
    assert [*rows] == [(size, number) for size in MODELS for number in numbers]
    for (size, number), figures in rows.items():
        for place, (recomputed, offload) in enumerate(kinds):
            found, estimated = figures[2 * place : 2 * place + 2]
            expected = forecast(QWEN[size], number, recomputed=recomputed, offload=offload) / GIB
            assert estimated == f"{expected:.1f}", (size, number)
            assert float(found) <= float(estimated) <= 1.1 * float(found), (size, number)
