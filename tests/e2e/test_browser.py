"""Prefect's and MLflow's pages: what other pages may not do with them; the quickstart refused, cancelled, retried, a
stage run again, the schedule switched on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from mlflow import MlflowClient
from playwright.sync_api import Page, expect

from tasks.rendering.markdown import escape, table
from tasks.tracking.traces import LONGEST_TEXT, Told, send, trace_id
from tests.conftest import make_sums
from tests.e2e.browsing import (
    FINAL,
    field,
    fill,
    id_of,
    open_afresh,
    open_deployment,
    open_form,
    submit_and_open_the_run,
    wait_for_updates,
    wait_until,
)
from tests.e2e.picturing import SHOWN, TIMELINE, Picture, assert_fits
from tests.hostile import EVIL, HOSTILE, read
from tests.serving import Served, serving
from tests.web import Quiet, answering

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]

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


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`grpo up` in a folder with the quickstart's inputs, as `make quickstart` builds and keeps them."""
    folder = tmp_path_factory.mktemp("project")
    make_sums(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with serving(folder / "storage", GRPO_CONFIGS=str(ROOT / "configs")) as servers:
            yield servers


@pytest.fixture
def foreign_page(page: Page, tmp_path: Path) -> Iterator[str]:
    """Address of a page that another server of this machine has, open in the browser."""
    (tmp_path / "index.html").write_text("<title>foreign</title><body>")

    class Handler(Quiet, SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(tmp_path))

    with answering(Handler) as url:
        page.goto(f"{url.replace('127.0.0.1', 'localhost')}/")
        yield page.url


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


def test_traces_load_and_run_nothing_in_mlflows_page_and_links_show_where_they_lead(
    served: Served, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow renders what was said as Markdown, and makes links of addresses that stand in it."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", served.mlflow_url)
    run = MlflowClient(served.mlflow_url).create_run("0").info.run_id
    texts = [text for text in EVIL if len(text) < LONGEST_TEXT]
    told = [
        Told(
            name="evil",
            identity=[text],
            prompt=text,
            messages=[{"role": "assistant", "content": text}],
            tokens=(1, 1),
            rewards={},
            tags={"category": text},
            time=1,
            run_id=run,
            others={"base": [{"role": "assistant", "content": text}]},
            expected=text,
        )
        for text in texts
    ]
    send(told, "0")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("dialog", lambda dialog: pytest.fail(f"a dialog: {dialog.message}"))
    for it in told:
        page.goto("about:blank")
        page.goto(f"{served.mlflow_url}/#/experiments/0/traces?selectedEvaluationId={trace_id(it)}")
        page.get_by_text("Assistant", exact=True).first.wait_for()
        for link in page.locator("a[href*=evil], a[href^='javascript:']").all():
            shown, leads = link.inner_text(), unquote(str(link.get_attribute("href")))
            assert leads.removeprefix("http://").removeprefix("mailto:").rstrip("/") == shown.removeprefix("http://")
    assert not [url for url in asked if "evil" in url]


def test_a_wrong_value_in_the_form_is_refused_by_the_name_of_its_key(
    served: Served, page: Page, picture: Picture
) -> None:
    open_deployment(page, served, "pipeline")
    page.get_by_role("listitem").filter(has_text="Description").click()
    page.get_by_text("From prompts and a base model").wait_for()
    page.locator("code").filter(has_text="learning_rate = 1e-4").first.wait_for()  # what a preset sets
    open_form(page, served)
    page.set_viewport_size(SHOWN)
    picture("form")
    rate = ("changes", "train.learning_rate")
    fill(page, {rate: "-1"})
    page.get_by_role("button", name="Submit").click()
    page.get_by_text("changes['train.learning_rate']").first.wait_for()
    page.set_viewport_size(SHOWN)
    field(page, rate).evaluate("field => field.scrollIntoView()")
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
    assert_fits(page)
    picture("report")


def test_a_stage_is_run_again(served: Served, page: Page) -> None:
    open_form(page, served, "evaluate", "run")
    fill(page, {"run": "quickstart"})
    field(page, "force").get_by_role("switch").click()
    run = submit_and_open_the_run(page, served)
    wait_until(page, "Completed")
    assert served.tasks(id_of(run), 1) == [("evaluate", "Completed")]


def test_a_schedule_is_switched_on_and_off(served: Served, page: Page) -> None:
    known = served.get("/deployments/name/pipeline/local")
    asked = {"active": False, "schedule": {"cron": "0 2 * * *", "timezone": "UTC"}, "slug": "nightly"}
    served.api.post(f"/deployments/{known['id']}/schedules", json=[asked]).raise_for_status()
    open_deployment(page, served, "pipeline")
    switch = page.get_by_role("switch").first
    for on in (True, False):
        expect(switch).not_to_have_class(re.compile("disabled"))  # until Prefect has answered, it takes no click
        switch.click()
        expect(switch).to_have_attribute("aria-checked", json.dumps(on))
        [schedule] = served.get("/deployments/name/pipeline/local")["schedules"]
        assert schedule["active"] == on
