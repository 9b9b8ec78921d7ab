"""What is published about curricula and the sampling correction follows from the recorded trainings."""

from __future__ import annotations

import json
from statistics import mean
from typing import Any

import pytest
from scipy import stats

from benchmarks.command import RESULTS, ROOT
from benchmarks.curriculum import LAST, paired, table


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
