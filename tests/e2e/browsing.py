"""Prefect's pages as a person uses them in a browser."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import urljoin

from playwright.sync_api import Locator, Page, expect

from tests.serving import RUN_SECONDS, Served

MILLISECONDS = 1000
FINAL = re.compile(r"^\s*(Completed|Failed|Crashed|Cancelled)\s*$")


def open_deployment(page: Page, served: Served, flow: str) -> None:
    page.goto(f"{served.prefect_url}/deployments")
    page.get_by_placeholder("Search deployments").fill(flow)  # the page lists ten
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name=flow, exact=True))
    row.get_by_role("link", name="local").click()


def open_form(page: Page, served: Served, flow: str = "pipeline", shows: str = "changes.train.max_steps") -> None:
    open_deployment(page, served, flow)
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()
    field(page, shows).wait_for()


def field(page: Page, path: str | Sequence[str]) -> Locator:
    """What the form, or the dialog of Resume, has for a key, such as "changes.train.max_steps", or ("changes",
    "train.max_steps") for the one at the top: label, description and input."""
    found = page.locator("form, .p-modal")
    for key in path.split(".") if isinstance(path, str) else path:
        named = f"normalize-space() = '{key}' or starts-with(normalize-space(), '{key} (')"
        label = f"div[contains(@class, 'p-label__header')]//span[{named}]"
        found = found.locator(f"xpath=.//div[{label}]")
    return found


def fill(page: Page, values: dict[Any, str]) -> None:
    for path, value in values.items():
        key = field(page, path)
        key.get_by_role("textbox").or_(key.get_by_role("spinbutton")).fill(value)


def choose(page: Page, path: str, choice: str) -> None:
    field(page, path).get_by_role("group").get_by_role("button").focus()
    page.keyboard.press("ArrowDown")
    page.locator(".p-select-option").filter(has_text=re.compile(f"^{choice}$")).click()


def submit_and_open_the_run(page: Page, served: Served) -> str:
    """Its address. The note that leads there moves, and is gone in seconds."""
    page.get_by_role("button", name="Submit").click()
    page.get_by_role("button", name="View run").first.wait_for()
    newest = served.filter("flow_runs", sort="EXPECTED_START_TIME_DESC", limit=1)[0]
    page.goto(f"{served.prefect_url}/runs/flow-run/{newest['id']}")
    return page.url


def id_of(run: str) -> str:
    return run.rsplit("/", 1)[-1].partition("?")[0]


def wait_until(page: Page, state: str) -> None:
    """Until the run whose page is open shows a final state, which has to be this one."""
    shown = page.get_by_text(FINAL).first
    shown.wait_for(timeout=RUN_SECONDS * MILLISECONDS)
    expect(shown).to_have_text(state)


def open_afresh(page: Page, run: str, state: re.Pattern[str] | str = FINAL) -> None:
    """Without what the page has drawn while the run went on: the time line leaves old labels."""
    page.goto("about:blank")
    page.goto(run)
    page.get_by_text(state).first.wait_for()


def open_artifact(page: Page, run: str, key: str) -> None:
    page.goto(run)
    page.get_by_role("listitem").filter(has_text="Artifacts").click()
    named = page.get_by_role("link", name=re.compile(rf"(?<![\w-]){key}(?![\w-])"))
    link = page.locator("a[href*='/artifacts/']").and_(named).first  # a flow may have the same name
    page.goto(urljoin(run, link.get_attribute("href")))  # the list is drawn again and again, under a click too


def wait_for_updates(page: Page) -> None:
    page.get_by_text(re.compile(r"step \d+/\d+ ")).first.wait_for(timeout=RUN_SECONDS * MILLISECONDS)
