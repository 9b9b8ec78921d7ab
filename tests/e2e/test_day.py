"""A person's day in the browser: a sweep started from Prefect's form and watched, the worst rollouts read, its arms
compared, the better one approved, and from its version in MLflow's registry to the prompts that it lost."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urljoin

import polars as pl
import pytest
from mlflow import MlflowClient
from playwright.sync_api import Page, expect

from tasks.stages.table import STAGES as TABLE
from tasks.tracking.runs import TRAINING_MODE
from tasks.tracking.view import RESULT, VIEW
from tests.conftest import make_sums
from tests.e2e.browsing import (
    MILLISECONDS,
    choose,
    field,
    fill,
    id_of,
    open_afresh,
    open_artifact,
    open_form,
    submit_and_open_the_run,
    wait_for_updates,
    wait_until,
)
from tests.e2e.picturing import SHOWN, TIMELINE, Picture, assert_fits
from tests.serving import Served, serving

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
STAGES = [stage.name for stage in TABLE]
SWEEP = "sums.sweep"
RATES = [3e-06, 1e-05, 0.0001]
SLOW, _, FAST = ARMS = [f"{SWEEP}.learning_rate-{rate}" for rate in RATES]
IN_MLFLOW = [f"learning_rate-{rate}" for rate in RATES]
FINAL = """
[[evaluation.sets]]
name = "final"
data = "storage/examples/arithmetic/final.parquet"

[promotion]
set = "final"
approval = true
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`grpo up` with the quickstart's inputs, and a preset `sums` whose versions are judged on sums of their own, and
    by a person."""
    folder = tmp_path_factory.mktemp("project")
    _write_final(make_sums(folder))
    (folder / "configs").mkdir()
    quickstart = (ROOT / "configs" / "quickstart.toml").read_text()
    (folder / "configs" / "quickstart.toml").write_text(quickstart)
    sums = quickstart.replace('name = "quickstart"', 'name = "sums"') + FINAL
    (folder / "configs" / "sums.toml").write_text(sums)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with serving(folder / "storage", GRPO_CONFIGS=str(folder / "configs")) as servers:
            yield servers


def _write_final(inputs: Path) -> None:
    """final.parquet: 300 sums that are neither trained on nor evaluated on, nor their mirror images."""
    known = {prompt for name in ("train", "eval") for prompt in pl.read_parquet(inputs / f"{name}.parquet")["prompt"]}
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100) if not {f"{a}+{b}=", f"{b}+{a}="} & known]
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in random.Random(0).sample(pairs, 300)]
    pl.DataFrame(rows).write_parquet(inputs / "final.parquet")


def _grpo(served: Served, *arguments: str) -> None:
    environment = {**os.environ, "GRPO_STORAGE": str(served.storage)}
    subprocess.run([sys.executable, "-m", "flows.cli.main", *arguments], check=True, env=environment)


def test_a_sweep_is_started_from_the_form_and_watched(served: Served, page: Page, picture: Picture) -> None:
    open_form(page, served, "sweep", "grid")
    choose(page, "preset", "sums")
    choose(page, "changes.rollout.engine", "transformers")
    fill(page, {"changes.train.max_steps": "40", "grid": json.dumps({"train.learning_rate": RATES})})
    page.set_viewport_size(SHOWN)
    field(page, "grid").evaluate("field => field.scrollIntoView()")
    picture("sweep-form")
    sweep = submit_and_open_the_run(page, served)
    _watch_an_arm(served, page, picture, sweep)
    page.goto(sweep)
    wait_until(page, "Completed")
    open_artifact(page, sweep, "sweep")
    page.get_by_text(f"Chosen on held-out: {FAST}").first.wait_for()
    page.get_by_role("cell", name="train.learning_rate=0.0001").wait_for()
    picture("sweep")


def _watch_an_arm(served: Served, page: Page, picture: Picture, sweep: str) -> None:
    assert f"{SLOW}: handed over" in served.messages_with(id_of(sweep), f"{SLOW}: handed over")
    open_afresh(page, sweep, "Running")
    page.get_by_role("listitem").filter(has_text="Subflow Runs").click()
    page.get_by_role("link", name=SLOW).first.click()
    page.wait_for_url(re.compile(f"flow-run/(?!{id_of(sweep)})"))
    arm = page.url
    wait_for_updates(page)
    wait_until(page, "Completed")
    open_artifact(page, arm, "training-live")
    page.get_by_text("tokens/s").first.wait_for()
    picture("live")
    assert served.tasks(id_of(arm), 5) == [(stage, "Completed") for stage in STAGES]
    open_afresh(page, arm)
    picture("pipeline", TIMELINE)
    for key, shown in {
        "data-report": "Reward rehearsal",
        "plan": "effective_batch_size",
        "evaluation": "minimum detectable difference",
        "evaluation-samples": "trained/completion",
        "registration": "in MLflow",
        "training-curves": "MLflow run",
    }.items():
        open_artifact(page, arm, key)
        page.get_by_text(shown).first.wait_for()
    page.get_by_role("img", name="training curves").wait_for()
    picture("curves")


def test_the_sweeps_page_says_which_arm_is_chosen(served: Served, page: Page, picture: Picture) -> None:
    page.goto((served.storage / "sweeps" / SWEEP / "report.html").as_uri())
    expect(page.locator(".verdict h2")).to_have_text(f"Chosen on held-out: {FAST}")
    assert_fits(page)
    picture("sweep-page")


def test_the_worst_rollouts_are_read(served: Served, page: Page, picture: Picture, tmp_path: Path) -> None:
    file = tmp_path / "worst.html"
    _grpo(served, "rollouts", FAST, "--order", "worst", "--limit", "20", "--html", str(file))
    page.goto(file.as_uri())
    token = page.locator(".tokens i[class*=surprise]").first
    plain = token.evaluate("token => getComputedStyle(token).backgroundColor")
    page.get_by_label("surprise").check()
    assert token.evaluate("token => getComputedStyle(token).backgroundColor") != plain
    expect(page.locator(".rollouts")).to_contain_text("numeric_match 0.000")
    assert_fits(page)
    picture("rollouts")


def test_the_arms_are_compared(served: Served, page: Page, picture: Picture, tmp_path: Path) -> None:
    file = tmp_path / "compared.html"
    _grpo(served, "compare", SLOW, FAST, "--html", str(file))
    page.goto(file.as_uri())
    expect(page.locator(".verdict h2")).to_contain_text(f"{FAST}: better than the run {SLOW} by ")
    assert_fits(page)
    picture("compare")

    page.goto(f"{served.mlflow_url}/#/experiments/1/runs{TRAINING_MODE}&viewStateShareKey={VIEW}")
    cells = page.get_by_role("gridcell")
    of_sweep = cells.filter(has=page.get_by_role("link", name=SWEEP, exact=True))
    of_sweep.get_by_role("button").click()  # shows its arms
    arm = page.get_by_role("link", name=IN_MLFLOW[-1], exact=True)
    arm.wait_for()
    expect(cells.filter(has_text=re.compile(r"^accuracy \S+ \[.*\], \S+ points \[.*\]$"))).to_have_count(len(ARMS))
    page.set_viewport_size(SHOWN)
    for column in (RESULT, "reward", "cost/sampled_tokens"):
        expect(page.locator(".ag-header-cell").get_by_text(column, exact=True)).to_be_in_viewport()
    picture("results")
    link = arm.get_attribute("href")
    page.locator("label", has=page.locator("[value=CHART]")).click()
    page.get_by_text("To look at first").wait_for()
    for name in IN_MLFLOW:
        page.get_by_text(f"{name} (reward)").wait_for()
    for metric in ("reward", "eval/held-out/trained/accuracy", "cost/sampled_tokens"):
        expect(page.get_by_text(metric, exact=True).first).to_be_in_viewport()
    picture("charts")
    page.goto(urljoin(page.url, f"{link}{TRAINING_MODE}"))
    page.get_by_text("Model metrics").first.click()
    page.get_by_placeholder("Search metric charts").fill("^(rewards/|reward$|entropy$|grad_norm$)")
    page.get_by_text(f"{IN_MLFLOW[-1]} (rewards/numeric_match/mean)").wait_for()
    picture("mlflow-run")


def test_the_chosen_arm_is_approved_and_its_version_leads_to_what_it_lost(
    served: Served, page: Page, picture: Picture
) -> None:
    open_form(page, served, "promote", "model")
    fill(page, {"model": "arithmetic"})
    run = submit_and_open_the_run(page, served)
    assert served.wait(id_of(run), "PAUSED")["state_name"] == "Suspended"
    open_afresh(page, run, "Suspended")
    page.get_by_role("button", name="Resume", exact=True).click()
    page.get_by_text(re.compile(r"Make arithmetic version \d the champion\?")).wait_for()
    picture("approval")
    field(page, "Make it the champion").get_by_role("switch").click()
    fill(page, {"Your name": "Ada", "Your reason": "right far more often, and no longer"})
    dialog = page.locator(".p-modal")
    submit = dialog.get_by_role("button", name="Submit")
    submit.click()
    with suppress(AssertionError):
        expect(dialog).to_have_count(0, timeout=10 * MILLISECONDS)
    if dialog.count():  # it takes no click while it checks what was typed
        submit.click()
    assert served.wait(id_of(run))["state_name"] == "Promoted"
    newest = served.filter("artifacts", flow_runs={"id": {"any_": [id_of(run)]}}, sort="CREATED_DESC")[0]
    page.goto(f"{served.prefect_url}/artifacts/artifact/{newest['id']}")
    version = page.get_by_role("link", name=re.compile(r"^version \d in MLflow"))
    version.wait_for()
    picture("promotion")
    tags = MlflowClient(served.mlflow_url).get_model_version_by_alias("arithmetic", "champion").tags
    assert (tags["promotion.by"], tags["promotion.words"]) == ("Ada", "right far more often, and no longer")
    page.goto(str(version.get_attribute("href")))
    page.get_by_text("champion").first.wait_for()
    lost = page.get_by_role("link", name="read them")
    lost.wait_for()
    picture("champion")
    with page.expect_popup() as opened:
        lost.click()
    traces = opened.value
    traces.get_by_role("button", name="Got it").click()  # MLflow advertises a feature
    first = traces.get_by_role("row").filter(has_text="tr-").first.inner_text()
    [number] = re.findall(r"tr-[0-9a-f]{32}", first)
    standing = MlflowClient(served.mlflow_url).get_trace(number).info.tags["vs_base"]
    assert standing == "worse", "what it lost is first"
    page.goto(traces.url)
    traces.close()
    picture("lost")
