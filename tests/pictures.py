"""The words that this project's code writes on the pages of docs/images, rendered from made-up runs. `make pictures`
records them beside the pictures."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import polars as pl
from matplotlib.figure import Figure
from matplotlib.text import Text

from flows.pipeline import pipeline
from flows.sweep import sweep
from grpo_core.config.files import parse_config
from grpo_core.planning.plan import make_plan, plan_inputs
from tasks.promotion import _markdown, _question
from tasks.register import describe, origin
from tasks.registry.champion import Outcome
from tasks.registry.gate import Contestant, decide
from tasks.rendering import drawing
from tasks.reports.compare import comparison_page
from tasks.reports.record import Record, read_record
from tasks.reports.report import report_page
from tasks.reports.rollouts import choose_rollouts, rollouts_page
from tasks.reports.sweep import choice_section, make_choice, sweep_page
from tasks.reports.sweep import describe as describe_choice
from tasks.tracking.live import live_table
from tests.made_up import made_up_run, metrics_of, outcomes_of, sampled, samples_of, values_of, write_sampled

RECORDED = Path(__file__).parents[1] / "docs" / "images" / "words.json"
VERDICTS = {name: f"verdict of {name}" for name in ("report", "compare", "sweep-page")}  # in RECORDED, with its figures
FIELDS = 6  # of the form, in one picture


def words_of(text: str) -> str:
    """The words of a text in their order, without numbers."""
    return " ".join(re.findall(r"(?<![\w.])[A-Za-z][\w/]*", text))


def words_of_pictures(folder: Path) -> dict[str, str]:
    """The words of each picture. `folder`: for a made-up run."""
    samples = samples_of({"base": outcomes_of(0, 0.4), "trained": outcomes_of(1, 0.9)})
    metrics = metrics_of(**{"completions/max_length": 5.0})
    record = read_record(made_up_run(folder, values_of("sums"), samples, metrics))
    plan = make_plan(plan_inputs(record.config, 24))
    page = report_page(record, 1.0, {}, "", "")
    final = {"evaluation": {"sets": [{"name": "final", "data": "final.parquet"}]}, "promotion": {"set": "final"}}
    judged, of_final = parse_config(values_of("sums", **final)), samples.with_columns(set=pl.lit("final"))
    verdict = decide(judged, *(Contestant(f"the {it} model", of_final, it) for it in ("trained", "base")))
    outcome = Outcome("promoted", "arithmetic", "1", "base", verdict.reason, verdict)
    made_by = origin("sums.sweep", {}, {"train": "1", "eval": "2", "eval-final": "3"})
    fields = [*_fields(pipeline.parameters.properties)]
    wrong = next(place for place, field in enumerate(fields) if field.startswith("train.learning_rate "))
    write_sampled(folder / "training", [[sampled(1, 0, {"numeric_match": 1.0})]], 1)
    tokenizer = mock.Mock(decode=lambda ids, **_: "")
    rollouts = rollouts_page(choose_rollouts(folder), tokenizer)
    arms = dict(_arms(folder.parent / "arms"))
    compared, choice = comparison_page(arms), make_choice(arms)
    form = sweep.parameters.properties
    texts = {
        "sweep-form": " ".join(
            f"{key} {form[key]['description']}" for key in ("grid", "seeds", "name", "stop_early", "optuna", "ranges")
        ),
        "sweep": f"{describe_choice(choice).headline} {choice_section(choice, arms).text}",
        "sweep-page": _before(sweep_page("sums.sweep", choice, arms), "Parameters that differ"),
        "compare": _before(compared, "Parameters that differ"),
        "rollouts": re.sub("<[^>]*>", " ", rollouts[rollouts.index("<form") : rollouts.index("</form>")]),
        "report": _before(page, "<table"),
        "live": " ".join(live_table(metrics, plan)[0]),
        "curves": _drawn(metrics),
        "form": " ".join(fields[:FIELDS]),
        "refused": " ".join(fields[wrong : wrong + FIELDS]),
        "promotion": _without_addresses(_markdown("", outcome)),
        "approval": _without_addresses(_question(outcome)),
        "champion": f"{describe(record.evaluation, record.metric)} {made_by}",
    }
    return {name: words_of(text) for name, text in texts.items()}


def _arms(folder: Path) -> Iterator[tuple[str, Record]]:
    for rate, right in ((1e-05, 0.5), (0.0001, 0.9)):
        name = f"sums.sweep.learning_rate-{rate}"
        values = values_of(name, train={"learning_rate": rate}, registry={"sweep": "sums.sweep"})
        samples = samples_of({"base": outcomes_of(0, 0.4), "trained": outcomes_of(1, right)})
        yield name, read_record(made_up_run(folder / name, values, samples, metrics_of(40)))


def _before(page: str, part: str) -> str:
    """The text of an HTML page from below its title to this part."""
    start = page.index("</header>")
    return html.unescape(re.sub("<[^>]*>", " ", page[start : page.index(part, start)]))


def _without_addresses(markdown: str) -> str:
    return re.sub(r"\]\([^)]*\)", "]", markdown)


def _fields(properties: dict[str, Any]) -> Iterator[str]:
    """Key and description of each field, in the order of the form."""
    for name, field in sorted(properties.items(), key=lambda item: item[1]["position"]):
        yield f"{name} {field.get('description', '')}"
        yield from _fields(field.get("properties", {}))


def _drawn(metrics: list[dict[str, float]]) -> str:
    """The text in the picture of a training's curves."""
    figure = Figure()
    with mock.patch.object(drawing, "png", lambda size, draw: draw(figure)):
        drawing.draw_curves(metrics)
    return " ".join(text.get_text() for text in figure.findobj(Text))
