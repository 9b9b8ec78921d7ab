"""The pictures of the documentation show its pages as they are today, and the text beside them has the same figures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import recipe_curves
from tests.pictures import RECORDED, VERDICTS, words_of_pictures
from tests.readme import ROOT, TUTORIALS

MAKEFILE = (ROOT / "Makefile").read_text()
TAKEN = re.compile(r'\bpicture\("([\w-]+)"')


@pytest.mark.slow
def test_each_pictured_page_still_has_the_words_of_its_picture(tmp_path: Path) -> None:
    recorded = json.loads(RECORDED.read_text())
    pictured = {name: words for name, words in recorded.items() if name not in VERDICTS.values()}
    assert words_of_pictures(tmp_path) == pictured, "pages read otherwise than in docs/images: run `make pictures`"


def test_make_pictures_renews_every_picture() -> None:
    files = re.findall(r"tests/e2e/test_\w+\.py", re.findall(r"^pictures:.*\n(?:\t.*\n)+", MAKEFILE, re.MULTILINE)[0])
    taken = {name for file in files for name in TAKEN.findall((ROOT / file).read_text())}
    assert taken | recipe_curves.PICTURES.keys() == {path.stem for path in RECORDED.parent.glob("*.png")}
    assert recipe_curves.PICTURES.keys() == json.loads(recipe_curves.RECORD.read_text()).keys()


def test_the_first_pages_tell_the_figures_of_the_pictured_report() -> None:
    verdict = json.loads(RECORDED.read_text())[VERDICTS["report"]]
    [(before, after, gain)] = re.findall(r"^(\S+)% \(base\) → (\S+)% \(trained\) .*?\+(\S+) points", verdict)
    readme, quickstart = (ROOT / "README.md").read_text(), (TUTORIALS / "quickstart.md").read_text()
    said = (
        f"answers {float(after):.0f} % of additions",
        f"instead of {float(before):.0f} %",
        f"{float(gain):.0f} points",
    )
    assert all(it in " ".join(readme.split()) for it in said)
    assert f"base {before}%, trained {after}%" in quickstart and f"by {gain} points" in quickstart


@pytest.mark.parametrize("picture", VERDICTS)
def test_a_page_tells_the_gain_and_the_interval_of_the_verdict_that_it_shows(picture: str) -> None:
    """In words or in a block, beside the picture."""
    verdict = json.loads(RECORDED.read_text())[VERDICTS[picture]]
    told = r"\+([\d.]+) points(?: over the base, 95% interval)? \[([\d.]+), ([\d.]+)\]"
    [(gain, low, high)] = re.findall(told, verdict)
    pages = [page for page in (ROOT / "docs").rglob("*.md") if f"images/{picture}.png)" in page.read_text()]
    assert pages
    for page in pages:
        text = page.read_text()
        missing = {figure for figure in (f"+{gain} points", f"[{low}, {high}]") if figure not in text}
        assert not missing, f"{page.name} shows the picture and does not tell its figures"
