"""Pages show the images of prompts where they stand in the text, and only those; texts say them in words."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from typer.testing import CliRunner

from flows.cli.main import app
from grpo_core.data.images import FILE, MARK, in_words, text_of
from tasks.evaluate import _cell
from tasks.rendering.page import Section, render
from tasks.reports.conversations import trained_on
from tasks.reports.record import Record, read_record
from tasks.reports.report import report_page
from tasks.reports.rollouts import choose_rollouts, rollouts_page
from tests.made_up import made_up_run, outcomes_of, sampled, samples_of, values_of, with_conversations, write_sampled
from tests.pages import Page
from tests.vision import picture, png

SIZES = [(30, 20), (25, 51), (8, 9)]  # width and height of the images 0 to 2
EVIL = '"><script>alert(1)</script>'


def _images(folder: Path) -> None:
    """The images of a run's prompts. Each differs from the others in its size."""
    rows = [
        {"image": png(picture(*size)), "height": size[1], "width": size[0], "tokens": 1, "grid": None} for size in SIZES
    ]
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, FILE), folder / "images.parquet", row_group_size=2)


def _asked(row: int) -> tuple[list[dict[str, str]], list[int]]:
    """Prompt and images of a row: every fourth is text alone, the last of four has two."""
    numbers: list[int] = [[], [2], [1], [0, 2]][row % 4]
    texts = [f"row {row}{EVIL}", *(f" then {place}." for place, _ in enumerate(numbers))]
    return [{"role": "system", "content": "Look."}, {"role": "user", "content": MARK.join(texts)}], numbers


@pytest.fixture
def run(tmp_path: Path) -> Path:
    samples = with_conversations(samples_of({"base": outcomes_of(0, 0.4), "trained": outcomes_of(1, 0.6)}))
    prompts, numbers = zip(*map(_asked, range(samples.height)), strict=True)
    samples = samples.with_columns(prompt=pl.Series(prompts), images=pl.Series(numbers, dtype=pl.List(pl.Int64)))
    folder = made_up_run(tmp_path / "runs" / "pictured", values_of("pictured"), samples, [])
    talk = {
        name.removeprefix("trained/"): value
        for name, value in samples.row(0, named=True).items()
        if name.startswith("trained/") and "rewards" not in name and name.count("/") == 1
    }
    del talk["kl"], talk["completion"], talk["completion_tokens"], talk["truncated"]
    batch = [
        sampled(1, row, {"numeric_match": 1.0}, advantage=float(row), trained_tokens=[1, 0, 1], **talk)
        | dict(zip(("prompt", "images"), _asked(row), strict=True))
        for row in range(4)
    ]
    write_sampled(folder / "training", [batch], 4)
    _images(folder / "dataset")
    return folder


def _page(record: Record) -> str:
    return report_page(record, 1.0, {}, "http://127.0.0.1:5000", "")


def _shown(html: str) -> list[tuple[int, list[tuple[int, int]]]]:
    """The prompts of a page: row, and the sizes of its images as they are decoded."""
    found = []
    for part in html.split('<div class="sample">')[1:]:
        prompt = part.split('<div class="completion')[0]
        [row] = re.findall(r">prompt (\d+)", prompt)
        addresses = re.findall(r'<img [^>]*src="data:image/png;base64,([^"]*)">', prompt)
        assert part.count("<img") == len(addresses), "no completion has an image"
        found.append((int(row), [Image.open(io.BytesIO(base64.b64decode(it))).size for it in addresses]))
    return found


def _own(row: int) -> list[tuple[int, int]]:
    return [SIZES[number] for number in _asked(row)[1]]


def test_the_report_shows_each_prompt_with_its_own_images_and_no_others(run: Path) -> None:
    html = _page(read_record(run))
    found = _shown(html)
    assert len(found) > 8 and {row % 4 for row, _ in found} == {0, 1, 2, 3}
    assert found == [(row, _own(row)) for row, _ in found]
    assert [row for row, _ in found[-2:]] == [3, 0], "those of highest and lowest advantage, in training"
    page = Page(html)
    words = [attributes["alt"] for tag, attributes in page.tags if tag == "img"]
    assert {*words} == {f"image {n}, {width} × {height} pixels" for n, (width, height) in enumerate(SIZES)}
    assert EVIL in page.text and EVIL not in html and "script" not in {tag for tag, _ in page.tags}
    assert MARK not in html
    assert page.references == {"http://127.0.0.1:5000"}


def test_an_image_stands_where_the_text_has_it(run: Path) -> None:
    [row] = [it for it in choose_rollouts(run, "step", 4).rows if it["row"] == 3]
    html = rollouts_page(choose_rollouts(run, "step", 4))
    user = html.split("row 3")[1].split("</pre>")[0]
    parts = re.split(r"<img [^>]*>", user)
    assert [it.split(".")[0].strip() for it in parts[1:]] == ["then 0", "then 1"]
    assert row["images"] == [0, 2]


def test_the_rollouts_show_images_as_the_report_does_and_in_words_in_the_terminal(run: Path) -> None:
    assert sorted(_shown(rollouts_page(choose_rollouts(run, "step", 4)))) == [(row, _own(row)) for row in range(4)]
    storage = {"GRPO_STORAGE": str(run.parents[1]), "COLUMNS": "200"}
    printed = CliRunner().invoke(app, ["rollouts", "pictured", "--order", "step", "--limit", "4"], env=storage)
    assert printed.exit_code == 0, printed.output
    assert MARK not in printed.output
    assert f"user: row 0{EVIL}\n" in re.sub(" +\n", "\n", printed.output)
    assert "[image: 30 × 20] then 0.[image: 8 × 9] then 1." in printed.output


def test_images_of_data_that_were_validated_since_are_not_those_of_the_rollouts(run: Path) -> None:
    """Their numbers would be of other images."""
    made = {"train": "one", "eval": "two"}
    (run / "training" / "lineage.json").write_text(json.dumps({"made_from": {"validate": {"train": "one"}}}))
    report = run / "dataset" / "report.json"
    for content, count in ((made, 4), (made | {"eval": "changed"}, 4), (made | {"train": "changed"}, 0)):
        report.write_text(json.dumps({"made": content}))
        html = rollouts_page(choose_rollouts(run, "step", 4))
        assert html.count("<img") == count
        assert html.count("not shown") == 4 - count
    storage = {"GRPO_STORAGE": str(run.parents[1])}
    printed = CliRunner().invoke(app, ["rollouts", "pictured", "--order", "step"], env=storage)
    assert printed.exit_code == 0 and "[image] then 0." in printed.output


def test_a_record_of_another_machine_names_the_images_that_are_not_there(run: Path) -> None:
    (run / "dataset" / "images.parquet").unlink()
    html = _page(read_record(run))
    assert "<img" not in html and "[image 2, not shown]" in html and MARK not in html


def test_a_rollout_is_found_by_its_text_beside_an_image(run: Path) -> None:
    found = choose_rollouts(run, prompt="row 3")
    assert [it["row"] for it in found.rows] == [3]
    assert choose_rollouts(run, text="then 1.").rows[0]["row"] == 3


def test_words_stand_for_images_in_marks_and_in_content_parts() -> None:
    sizes = [(20, 30), (51, 25)]
    marked = [{"role": "user", "content": f"a{MARK}b{MARK}"}, {"role": "assistant", "content": None}]
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}, {"type": "image"}]
    for content in (marked[0]["content"], parts):
        prompt: list[dict[str, Any]] = [{"role": "user", "content": content}, marked[1]]
        assert in_words(prompt, sizes)[0]["content"] == "a[image: 30 × 20]b[image: 25 × 51]"
        assert in_words(prompt)[0]["content"] == "a[image]b[image]"
        assert in_words(prompt)[1] == marked[1]
    assert text_of(parts) == marked[0]["content"]
    assert in_words("text") == "text"
    assert in_words([{"role": "user", "content": "text"}]) == [{"role": "user", "content": "text"}]


def test_prefect_s_table_says_images_in_words() -> None:
    cell = _cell("prompt", [{"role": "user", "content": f"{MARK}How many?"}])
    assert MARK not in cell and "image" in cell


def test_a_page_without_images_is_written_as_before() -> None:
    row = sampled(3, 7, {"numeric_match": 1.0}, prompt=[{"role": "user", "content": "1 < 2?"}], reward=1.0)
    html = render("t", "s", [], [Section("Rollouts", rollouts=[trained_on(row, "update 3")])])
    written = html.split('<div class="rollouts">')[1].split("</section>")[0]
    assert written == (  # as the template did that knew no images
        '<div class="sample">\n<div class="prompt"><div class="soft">prompt 7</div>\n'
        '<pre><b>user:</b> 1 &lt; 2?</pre></div>\n<div class="completion ">\n'
        '<div class="soft">update 3 · <span>reward 1.000, advantage 0.000</span> · 3 tokens</div>\n'
        '<div class="soft">numeric_match 1.000</div><pre>8</pre></div>\n</div>\n</div>'
    )
