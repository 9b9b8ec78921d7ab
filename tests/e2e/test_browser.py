"""A person's day in the browser: the quickstart started from Prefect's form, cancelled, retried; a stage run again, its
version promoted; another run watched, its model in MLflow; the schedule switched on. With GRPO_PICTURES=FOLDER the
pictures of the documentation are written there, with the words that this project has in them (`make pictures`)."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Page, ViewportSize, expect, sync_playwright

from tasks.rendering.markdown import escape, table
from tasks.stages.table import STAGES as TABLE
from tests.conftest import EXAMPLE
from tests.e2e.browsing import (
    FINAL,
    MILLISECONDS,
    choose,
    field,
    fill,
    id_of,
    open_afresh,
    open_artifact,
    open_deployment,
    open_form,
    submit_and_open_the_run,
    wait_for_updates,
    wait_until,
)
from tests.pictures import RECORDED, VERDICT, words_of_pictures
from tests.serving import Served, serving
from tests.tasks.rendering.test_markdown import HOSTILE, read

pytestmark = pytest.mark.e2e

INPUTS = Path("storage", "examples", "arithmetic")  # where the preset expects them, relative to where `grpo up` runs
STAGES = [stage.name for stage in TABLE]
PATIENCE = 120 * MILLISECONDS  # for a page, on a busy machine
SETTLE = 2500  # milliseconds before a picture is taken
TIMELINE = 15 * MILLISECONDS  # the same for a timeline: it is drawn on a canvas, which does not say when it is done
TALL: ViewportSize = {"width": 1280, "height": 1600}  # Prefect's UI loads what comes into view
SHOWN: ViewportSize = {"width": 1280, "height": 800}
PHONE: ViewportSize = {"width": 390, "height": 844}
Picture = Callable[..., None]

# What a page of another server tries, though it knows every id: JSON, which asks permission first, requests that ask
# none, a form, websockets. Answers what it could read or open.
ATTACK = """async ({url, id, changed}) => {
    const read = [], api = url + "/api", path = `${api}/deployments/${id}`
    const ask = async (address, options) => {
        const answer = await fetch(address, {method: "POST", ...options}).catch(error => ({type: "error"}))
        if (!["error", "opaque"].includes(answer.type)) read.push(address)
    }
    const json = {headers: {"Content-Type": "application/json"}}
    await ask(`${api}/deployments/filter`, {...json, body: "{}"})
    await ask(`${api}/deployments/`, {...json, body: JSON.stringify(changed)})
    await ask(`${path}/create_flow_run`, {...json, body: "{}"})
    await ask(`${api}/deployments/`, {mode: "no-cors", body: JSON.stringify(changed)})
    await ask(`${path}/pause_deployment`, {mode: "no-cors"})
    await ask(`${path}/pause_deployment`, {})
    document.body.innerHTML = `<iframe name="frame"></iframe>
        <form method="post" action="${path}/pause_deployment" target="frame"></form>`
    const answered = new Promise(resolve => document.querySelector("iframe").onload = resolve)
    document.querySelector("form").submit()
    await answered
    for (const name of ["events/in", "events/out", "logs/out"]) {
        const socket = new WebSocket(`${api.replace("http", "ws")}/${name}`, "prefect")
        await new Promise(resolve => { socket.onopen = () => resolve(read.push(name)); socket.onerror = resolve })
    }
    return read
}"""

# Without a GPU, 60 frames a second of Prefect's timeline take a core from the run that it shows.
FEW_FRAMES = """
window.requestAnimationFrame = draw => setTimeout(() => draw(performance.now()), 200);
window.cancelAnimationFrame = clearTimeout;
"""

# MLflow greets a new browser with a dialog and an assistant.
SEEN_BEFORE = """
localStorage.setItem("_mlflow_model_registry_promo_modal_dismissed_v1", "true");
localStorage.setItem("mlflow.assistant.fab.autoOpenedOnFirstLoad_v1", "true");
localStorage.setItem("mlflow.assistant.panelOpen_v1", "false");
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`grpo up` in a folder with the quickstart's inputs, as `make quickstart` builds and keeps them."""
    built = EXAMPLE.parents[2] / INPUTS
    subprocess.run([sys.executable, EXAMPLE, "--out", built], check=True)
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(built, folder / INPUTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with serving(folder / "storage") as servers:
            yield servers


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    browser = shutil.which("chromium")
    assert browser, "no browser on this machine: install Debian's package `chromium`"
    with sync_playwright() as playwright:
        rebound = "--host-resolver-rules=MAP evil.example 127.0.0.1"
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", rebound])
        context = chromium.new_context(viewport=TALL)
        context.add_init_script(SEEN_BEFORE)
        context.add_init_script(FEW_FRAMES)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        expect.set_options(timeout=PATIENCE)
        yield page
        chromium.close()


@pytest.fixture
def picture(page: Page, tmp_path: Path) -> Picture:
    """Writes NAME.png of what the page shows, and records the words in it that are this project's own."""
    asked = os.environ.get("GRPO_PICTURES")
    folder = EXAMPLE.parents[2] / asked if asked else tmp_path
    words, record = words_of_pictures(tmp_path / "made-up"), folder / RECORDED.name

    def take(name: str, settle: int = SETTLE) -> None:
        page.set_viewport_size(SHOWN)
        recorded = json.loads(record.read_text()) if record.exists() else {}
        if name in words:
            recorded[name] = words[name]
            shown = [] if name == "curves" else words[name].split()  # those of the curves are in an image
            page.wait_for_function("words => words.every(word => document.body.innerText.includes(word))", arg=shown)
        if asked:
            page.wait_for_timeout(settle)
        if name == "report":
            recorded[VERDICT] = page.locator(".verdict p").inner_text()
        record.write_text(json.dumps(recorded, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        shot.quantize(128, dither=Image.Dither.NONE).save(folder / f"{name}.png", optimize=True)
        page.set_viewport_size(TALL)

    return take


@pytest.fixture
def foreign_page(page: Page, tmp_path: Path) -> Iterator[str]:
    """Address of a page that another server of this machine has, open in the browser."""
    (tmp_path / "index.html").write_text("<title>foreign</title><body>")

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(tmp_path))

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.goto(f"http://localhost:{server.server_port}/")
        yield page.url
        server.shutdown()


def _deployment(served: Served) -> dict[str, Any]:
    """All of it except when its runner last asked for runs."""
    found = served.get("/deployments/name/rollback/local")
    return {key: value for key, value in found.items() if key != "last_polled"}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_foreign_page_runs_nothing_and_reads_nothing(
    served: Served, page: Page, foreign_page: str, host: str, tmp_path: Path
) -> None:
    before = _deployment(served)
    step = {"prefect.deployments.steps.run_shell_script": {"script": f"touch {tmp_path / 'ran'}"}}
    changed = {"name": "local", "flow_id": before["flow_id"], "pull_steps": [step]}
    url = served.prefect_url.replace("127.0.0.1", host)
    assert page.evaluate(ATTACK, {"url": url, "id": before["id"], "changed": changed}) == []
    assert _deployment(served) == before
    assert not served.filter("flow_runs")
    assert not (tmp_path / "ran").exists()


def test_a_foreign_name_that_points_here_shows_no_page_of_prefect_or_mlflow(served: Served, page: Page) -> None:
    for url in (served.prefect_url, f"{served.prefect_url}/api/health", served.mlflow_url):
        answer = page.goto(url.replace("127.0.0.1", "evil.example"))
        assert answer and answer.status == 403


def test_prefects_page_works_under_both_names_of_the_machine(served: Served, page: Page) -> None:
    for host in ("localhost", "127.0.0.1"):
        page.goto(served.prefect_url.replace("127.0.0.1", host) + "/deployments")
        page.get_by_role("link", name="pipeline", exact=True).wait_for()


def test_text_of_prompts_makes_no_element_in_prefects_page(served: Served, page: Page) -> None:
    as_markdown = table([("value",), *((text,) for text in HOSTILE)])
    as_table = json.dumps([{"value": escape(text)} for text in HOSTILE])
    for kind, data in (("markdown", as_markdown), ("table", as_table)):
        artifact = {"key": "hostile", "type": kind, "data": data}
        made = served.api.post("/artifacts/", json=artifact).raise_for_status().json()
        page.goto(f"{served.prefect_url}/artifacts/artifact/{made['id']}")
        cells = page.get_by_role("cell")
        expect(cells).to_have_count(len(HOSTILE))
        for cell, text in zip(cells.all(), HOSTILE, strict=True):
            assert cell.locator("a, img, script, code, strong, em, del, h1, li").count() == 0
            assert "".join(cell.inner_text().split()) == read(text)


def test_a_wrong_value_in_the_form_is_refused_by_the_name_of_its_key(
    served: Served, page: Page, picture: Picture
) -> None:
    open_deployment(page, served, "pipeline")
    page.get_by_role("listitem").filter(has_text="Description").click()
    page.get_by_text("From prompts and a base model").wait_for()
    open_form(page, served)
    fill(page, {"changes.train.learning_rate": "-1"})
    page.get_by_role("button", name="Submit").click()
    page.get_by_text("changes.train.learning_rate").first.wait_for()
    page.set_viewport_size(SHOWN)
    field(page, "changes.train.learning_rate").evaluate("field => field.scrollIntoView()")
    picture("refused")
    assert not served.filter("flow_runs")


def test_a_run_cancelled_in_the_browser_goes_on_where_it_was_when_it_is_retried_there(
    served: Served, page: Page, picture: Picture
) -> None:
    open_form(page, served)
    run = submit_and_open_the_run(page, served)
    wait_for_updates(page)
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.locator(".p-modal").get_by_role("button", name="Confirm").click()
    wait_until(page, "Cancelled")
    page.get_by_text(re.compile("told to stop")).first.wait_for()
    announced = served.events("grpo.run.cancelled", "grpo.training.stopped")
    assert [payload["run"] for payload in announced.values()] == ["quickstart", "quickstart"]
    page.get_by_role("button", name="Retry", exact=True).click()
    page.locator(".p-modal").get_by_role("button", name="Retry").click()
    page.get_by_text(FINAL).first.wait_for(state="detached")
    wait_until(page, "Completed")
    tasks = served.tasks(id_of(run), 7)
    assert [state for task, state in tasks if task in ("validate", "plan")][-2:] == ["Skipped", "Skipped"]
    open_afresh(page, run)
    picture("retried", TIMELINE)


def test_the_report_is_as_wide_as_the_screen_and_a_phone(served: Served, page: Page, picture: Picture) -> None:
    page.goto((served.storage / "runs" / "quickstart" / "evaluation" / "report.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= SHOWN["width"]
    picture("report")
    page.set_viewport_size(PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.set_viewport_size(TALL)


def _grpo(served: Served, *arguments: str) -> None:
    environment = {**os.environ, "GRPO_STORAGE": str(served.storage)}
    subprocess.run([sys.executable, "-m", "flows.cli.main", *arguments], check=True, env=environment)


def test_the_page_of_rollouts_colours_tokens_and_fits_the_screen_and_a_phone(
    served: Served, page: Page, picture: Picture, tmp_path: Path
) -> None:
    file = tmp_path / "rollouts.html"
    _grpo(served, "rollouts", "quickstart", "--limit", "20", "--html", str(file))
    page.goto(file.as_uri())
    token = page.locator(".tokens i[class*=surprise]").first
    plain = token.evaluate("token => getComputedStyle(token).backgroundColor")
    page.get_by_label("surprise").check()
    assert token.evaluate("token => getComputedStyle(token).backgroundColor") != plain
    assert page.evaluate("document.documentElement.scrollWidth") <= SHOWN["width"]
    picture("rollouts")
    page.set_viewport_size(PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.set_viewport_size(TALL)


def test_a_stage_is_run_again_and_the_version_promoted(served: Served, page: Page, picture: Picture) -> None:
    open_form(page, served, "evaluate", "run")
    fill(page, {"run": "quickstart"})
    field(page, "force").get_by_role("switch").click()
    run = submit_and_open_the_run(page, served)
    wait_until(page, "Completed")
    assert served.tasks(id_of(run), 1) == [("evaluate", "Completed")]

    open_form(page, served, "promote", "model")
    fill(page, {"model": "arithmetic"})
    choose(page, "changes.promotion.approval", "true")
    run = submit_and_open_the_run(page, served)
    assert served.wait(id_of(run), "PAUSED")["state_name"] == "Suspended"
    open_afresh(page, run, "Suspended")
    page.get_by_role("button", name="Resume", exact=True).click()
    page.get_by_text("Make arithmetic version 1 the champion?").wait_for()
    picture("approval")
    field(page, "Make it the champion").get_by_role("switch").click()
    fill(page, {"Your name": "Ada", "Your reason": "right far more often, and no longer"})
    page.locator(".p-modal").get_by_role("button", name="Submit").click()
    assert served.wait(id_of(run))["state_name"] == "Promoted"
    newest = served.filter("artifacts", flow_runs={"id": {"any_": [id_of(run)]}}, sort="CREATED_DESC")[0]
    page.goto(f"{served.prefect_url}/artifacts/artifact/{newest['id']}")
    page.get_by_text("arithmetic version 1: promoted").first.wait_for()
    picture("promotion")
    page.goto(f"{served.mlflow_url}/#/models/arithmetic/versions/1")
    page.get_by_text("champion").first.wait_for()
    picture("champion")


def test_a_run_from_the_form_is_seen_to_complete_in_prefect_and_mlflow(
    served: Served, page: Page, picture: Picture
) -> None:
    open_form(page, served)
    choose(page, "preset", "quickstart")
    choose(page, "changes.rollout.engine", "transformers")
    changes = {
        "model.name_or_path": f"{INPUTS}/base",
        "data.train": f"{INPUTS}/train.parquet",
        "data.eval": f"{INPUTS}/eval.parquet",
        "train.max_steps": "60",
        "name": "slower",
        "train.learning_rate": "0.00005",
    }
    fill(page, {f"changes.{key}": value for key, value in changes.items()})
    field(page, "changes.train.max_steps").scroll_into_view_if_needed()
    field(page, "preset").scroll_into_view_if_needed()
    picture("form")
    run = submit_and_open_the_run(page, served)

    wait_for_updates(page)
    open_artifact(page, run, "training-live")
    page.get_by_text("tokens/s").first.wait_for()
    picture("live")
    page.goto(run)
    wait_until(page, "Completed")
    assert served.tasks(id_of(run), 5) == [(stage, "Completed") for stage in STAGES]
    open_afresh(page, run)
    picture("pipeline", TIMELINE)
    for key, shown in {
        "data-report": "Reward rehearsal",
        "plan": "effective_batch_size",
        "evaluation": "minimum detectable difference",
        "evaluation-samples": "trained/completion",
        "registration": "arithmetic version 2",
        "training-curves": "MLflow run",
    }.items():
        open_artifact(page, run, key)
        page.get_by_text(shown).first.wait_for()
    page.get_by_role("img", name="training curves").wait_for()
    picture("curves")

    page.goto(f"{served.mlflow_url}/#/experiments/1/runs")
    page.get_by_role("link", name="slower").first.click()
    page.get_by_role("tab", name="Model metrics").or_(page.get_by_text("Model metrics")).first.click()
    page.get_by_placeholder("Search metric charts").fill("^(rewards/|reward$|entropy$|grad_norm$)")
    page.get_by_text("slower (rewards/numeric_match/mean)").wait_for()
    picture("mlflow-run")
    page.goto(f"{served.mlflow_url}/#/models/arithmetic/versions/2")
    page.get_by_text("candidate").first.wait_for()


def test_the_schedule_is_switched_on_and_off(served: Served, page: Page) -> None:
    open_deployment(page, served, "pipeline")
    switch = page.get_by_role("switch").first
    for on in (True, False):
        switch.click()
        expect(switch).to_have_attribute("aria-checked", json.dumps(on))
        [schedule] = served.get("/deployments/name/pipeline/local")["schedules"]
        assert schedule["active"] == on
