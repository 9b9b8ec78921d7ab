"""A browser, and the pictures that a test takes of what it shows. With GRPO_PICTURES=FOLDER the pictures of the
documentation are written there, with the words that this project has in them (`make pictures`)."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, ViewportSize, expect, sync_playwright

from tests.e2e.browsing import MILLISECONDS
from tests.needs import needs
from tests.pictures import RECORDED, VERDICTS, words_of_pictures

PATIENCE = 120 * MILLISECONDS  # for a page, on a busy machine
SETTLE = 2500  # milliseconds before a picture is taken
TIMELINE = 15 * MILLISECONDS  # the same for a timeline: it is drawn on a canvas, which does not say when it is done
TALL: ViewportSize = {"width": 1280, "height": 1600}  # Prefect's UI loads what comes into view
SHOWN: ViewportSize = {"width": 1280, "height": 800}
PHONE: ViewportSize = {"width": 390, "height": 844}
Picture = Callable[..., None]

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


@contextmanager
def browser_page() -> Iterator[Page]:
    needs("chromium")
    with sync_playwright() as playwright:
        rebound = "--host-resolver-rules=MAP evil.example 127.0.0.1"
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox", rebound])
        context = chromium.new_context(viewport=TALL)
        context.add_init_script(SEEN_BEFORE)
        context.add_init_script(FEW_FRAMES)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        expect.set_options(timeout=PATIENCE)
        yield page
        chromium.close()


def photographer(page: Page, own: Path) -> Picture:
    """Writes NAME.png of what the page shows, and records the words in it that are this project's own."""
    asked = os.environ.get("GRPO_PICTURES")
    folder = Path(__file__).parents[2] / asked if asked else own
    words, record = words_of_pictures(own / "made-up"), folder / RECORDED.name

    def picture(name: str, settle: int = SETTLE) -> None:
        page.set_viewport_size(SHOWN)
        recorded = json.loads(record.read_text()) if record.exists() else {}
        if name in words:
            recorded[name] = words[name]
            shown = [] if name == "curves" else words[name].split()  # those of the curves are in an image
            page.wait_for_function("words => words.every(word => document.body.innerText.includes(word))", arg=shown)
        if asked:
            page.wait_for_timeout(settle)
        if name in VERDICTS:
            recorded[VERDICTS[name]] = page.locator(".verdict p").inner_text()
        record.write_text(json.dumps(recorded, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        shot.quantize(128, dither=Image.Dither.NONE).save(folder / f"{name}.png", optimize=True)
        page.set_viewport_size(TALL)

    return picture


def assert_fits(page: Page) -> None:
    """The page is no wider than a screen and a phone."""
    for size in (SHOWN, PHONE):
        page.set_viewport_size(size)
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    page.set_viewport_size(TALL)
