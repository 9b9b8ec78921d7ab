"""What the simulations behind pages show, cut down: of groups, of the best-looking of many versions, of sweeps by
seeds, and of the memory of a sharded update."""

from __future__ import annotations

import pytest

from benchmarks.command import RESULTS, ROOT
from benchmarks.decisions import groups_table
from benchmarks.looks import p_values_of, promoted
from benchmarks.seeds import LAWS, shares
from benchmarks.sharded_memory import GPUS, MODELS, forecast, simulated
from grpo_core.planning.memory import GIB
from grpo_core.planning.shapes import model_shape
from tests.qwen import QWEN


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
    assert len(shown) == 9 and all(share <= 5 for row in shown[:3] for share in _shares(row))
    for row in (shown[0], shown[1], shown[4], shown[6]):
        assert row in page


def _shares(row: str) -> list[float]:
    return [float(cell.removesuffix(" % ")) for cell in row.rstrip("|").split("| ")]


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
