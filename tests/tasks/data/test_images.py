"""Images of data sets: found in every form that they come in, opened once, numbered by their pixels, and counted in
tokens; what cannot be used is named by row and reason."""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

from flows.cli.main import app
from flows.parameters import early_refusals
from grpo_core import run_files
from grpo_core.config.files import dump_config, parse_config
from grpo_core.config.inputs import ModelConfig
from grpo_core.data.images import MARK, open_image, parts, show_images
from grpo_core.data.processor import load_processor
from grpo_core.errors import ConfigError
from grpo_core.rollout.loading import read_prompts
from tasks import screen as screening
from tasks import validate
from tasks.data.forecast_inputs import first_lengths
from tasks.data.images import reading
from tasks.data.images.tokenizer import NUMBERED, ImageTokenizer
from tasks.data.lengths import _most_tokens, token_lengths
from tasks.data.rows import write_rows
from tasks.reports import data_report
from tasks.screen import refusal
from tasks.stages.errors import StageError
from tasks.stages.run import Context
from tasks.stages.table import VALIDATE
from tests.conftest import config_values
from tests.rows import screen, whole, write_lines
from tests.vision import FAMILIES, make_vision_base, picture, png

Row = dict[str, Any]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_base(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl")


def _values(model: Path, folder: Path, train: list[Row] | None = None, held: list[Row] | None = None) -> Row:
    """The configuration of these rows, each an image and a question, or with columns of their own."""
    sets = {"train": train or _rows(range(4)), "eval": held or _rows(range(10, 13))}
    for name, rows in sets.items():
        pl.DataFrame(rows, infer_schema_length=None).write_parquet(folder / f"{name}.parquet")
    return config_values(model, folder)


def _rows(seeds: Any, **more: Any) -> list[Row]:
    return [
        {"prompt": _asked(f"How many in {seed}?"), "image": png(picture(seed=seed)), "answer": "1", **more}
        for seed in seeds
    ]


def _asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _screened(values: Row, folder: Path) -> Any:
    """What is screened, with frames and with the images' pixels by number."""
    screened = screening.screen(parse_config(values), folder)
    assert not screened.refused, refusal(screened)
    return {name: whole(rows) for name, rows in screened.kept.items()}, _pixels(folder / run_files.IMAGES), screened


def _in_order(frame: pl.DataFrame) -> list[list[int]]:
    """The numbers of the rows' images, counted as they first occur: held-out prompts have had the first ones."""
    known: dict[int, int] = {}
    return [[known.setdefault(number, len(known)) for number in row] for row in frame["images"].to_list()]


def _pixels(path: Path) -> list[Image.Image]:
    return [open_image(it) for it in pq.read_table(path)["image"].to_pylist()]


def _same(one: Image.Image, other: Image.Image) -> bool:
    return one.size == other.size and np.array_equal(np.asarray(one), np.asarray(other))


def _in_form(form: str, folder: Path, seeds: list[int]) -> tuple[str, list[Row]]:
    """Rows with one image each, in this form."""
    (folder / "pictures").mkdir(exist_ok=True)
    for seed in seeds:
        picture(seed=seed).save(folder / "pictures" / f"{seed}.png")
    relative = {seed: f"pictures/{seed}.png" for seed in seeds}
    bare = {seed: png(picture(seed=seed)) for seed in seeds}
    given = {
        "paths": relative,
        "absolute paths": {seed: str(folder / relative[seed]) for seed in seeds},
        "bytes": bare,
        "data: URLs": {seed: f"data:image/png;base64,{base64.b64encode(bare[seed]).decode()}" for seed in seeds},
        "datasets' images": {seed: {"bytes": bare[seed], "path": "a.png"} for seed in seeds},
        "datasets' paths": {seed: {"bytes": None, "path": relative[seed]} for seed in seeds},
    }[form]
    return form, [{"prompt": _asked(f"{seed}?"), "image": given[seed], "answer": "1"} for seed in seeds]


FORMS = ["paths", "absolute paths", "bytes", "data: URLs", "datasets' images", "datasets' paths"]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_images_are_found_in_each_form(qwen: Path, tmp_path: Path, form: str, several: bool) -> None:
    _, rows = _in_form(form, tmp_path, [0, 1, 0, 2])
    rows = [{**row, "prompt": _asked(f"{place}")} for place, row in enumerate(rows)]
    if several:
        rows = [{"images": [rows[0]["image"], row["image"]], **row} for row in rows]
        rows = [{name: value for name, value in row.items() if name != "image"} for row in rows]
    kept, pixels, _ = _screened(_values(qwen, tmp_path, rows), tmp_path)
    numbers = [[0, number] if several else [number] for number in (0, 1, 0, 2)]
    assert _in_order(kept["train"]) == numbers
    assert kept["train"]["prompt"].to_list() == [_asked(f"{MARK * len(n)}{p}") for p, n in enumerate(numbers)]
    first = dict.fromkeys(number for row in kept["train"]["images"] for number in row)
    assert [_same(pixels[number], picture(seed=seed)) for seed, number in enumerate(first)] == [True] * 3
    assert kept["train"].columns == ["prompt", "answer", "images"]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "saved"])
def test_other_files_have_images_too(qwen: Path, tmp_path: Path, kind: str) -> None:
    _, rows = _in_form("paths", tmp_path, [0, 1, 2, 3])
    rows = [{"question": row["prompt"][0]["content"], "shown": row["image"], "answer": "1"} for row in rows]
    values = _values(qwen, tmp_path)
    values["data"] |= {"columns": {"prompt": "question", "image": "shown"}, "system_prompt": ""}
    path = tmp_path / f"mine.{kind}"
    if kind == "csv":
        pl.DataFrame(rows).write_csv(path)
    elif kind == "jsonl":
        write_lines(path, rows)
    else:
        features = datasets.Features(
            {"question": datasets.Value("string"), "shown": datasets.Image(), "answer": datasets.Value("string")}
        )
        pictured = [{**row, "shown": {"bytes": (tmp_path / row["shown"]).read_bytes(), "path": None}} for row in rows]
        datasets.Dataset.from_list(pictured, features).save_to_disk(path)
    values["data"]["train"] = str(path)
    held = [{"question": "9?", "shown": png(picture(seed=9)), "answer": "1"}]
    pl.DataFrame(held).write_parquet(tmp_path / "eval.parquet")
    kept, pixels, _ = _screened(values, tmp_path)
    assert kept["train"]["prompt"].to_list() == [_asked(f"{MARK}{n}?") for n in range(4)]
    assert [_same(pixels[n], picture(seed=row)) for row, (n,) in enumerate(kept["train"]["images"])] == [True] * 4


def test_content_parts_become_text_with_marks_and_images_in_their_order(qwen: Path, tmp_path: Path) -> None:
    inline = base64.b64encode(png(picture(seed=1))).decode()
    content = [
        {"type": "text", "text": "First "},
        {"type": "image", "base64": inline},
        {"type": "text", "text": "then "},
        {"type": "image"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{inline}"}},
    ]
    train = [
        {
            "prompt": [
                {"role": "system", "content": [{"type": "text", "text": "Be short."}]},
                {"role": "user", "content": content},
                {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]},
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]},
            ],
            "images": [{"bytes": png(picture(seed=seed))} for seed in (2, 3)],
            "answer": "1",
        }
    ]
    held = [{**train[0], "prompt": [{"role": "user", "content": [{"type": "text", "text": "!"}]}], "images": []}]
    values = _values(qwen, tmp_path, train, held)
    values["data"]["system_prompt"] = "Not this, since there is one."
    kept, pixels, _ = _screened(values, tmp_path)
    (row,) = kept["train"].to_dicts()
    assert [it["content"] for it in row["prompt"]] == [
        "Be short.",
        f"First {MARK}then {MARK}{MARK}",
        "Yes.",
        f"{MARK}?",
    ]
    assert [_same(pixels[n], picture(seed=seed)) for n, seed in zip(row["images"], (1, 2, 1, 3), strict=True)] == [
        True
    ] * 4
    assert len(pixels) == 3
    (row,) = kept["eval"].to_dicts()
    assert [it["content"] for it in row["prompt"]] == ["Not this, since there is one.", "!"]
    assert row["images"] == []


def test_json_lines_may_have_texts_beside_parts(qwen: Path, tmp_path: Path) -> None:
    image = {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png(picture())).decode()}"},
    }
    rows = [
        {
            "prompt": [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": [image, {"type": "text", "text": f"{number}?"}]},
            ],
            "answer": "1",
        }
        for number in range(3)
    ]
    values = _values(qwen, tmp_path)
    told = [{"prompt": _asked("Who?"), "answer": "1"}]
    values["data"]["train"] = str(write_lines(tmp_path / "train.jsonl", [*rows, *told]))
    values["data"]["eval"] = str(write_lines(tmp_path / "eval.jsonl", [{"prompt": _asked("When?"), "answer": "1"}]))
    kept, _, _ = _screened(values, tmp_path)
    assert [it["content"] for it in kept["train"]["prompt"][1]] == ["Be short.", f"{MARK}1?"]
    assert kept["train"]["prompt"][3].to_list() == _asked("Who?")
    assert _in_order(kept["train"]) == [[0], [0], [0], []]


def test_a_reward_may_read_the_images(qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "looking.py").write_text("def looks(completions, images):\n    return [1.0 for _ in images]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    values = _values(qwen, tmp_path)
    values["rewards"] = [{"function": "looking:looks"}]
    values["data"]["columns"] = {"images": "image"}
    kept, _, _ = _screened(values, tmp_path)
    assert _in_order(kept["train"]) == [[0], [1], [2], [3]]


def _numbered(row: Row) -> Any:
    """The prompt as it is while data are checked."""
    ((message,), numbers) = row["prompt"], iter(row["images"])
    text = "".join(f"{MARK}{next(numbers)}{MARK}" if it == MARK else it for it in message["content"])
    return [{**message, "content": text}]


DRAWN = st.lists(
    st.tuples(
        st.lists(st.one_of(st.text(st.sampled_from("ab\n é"), max_size=3), st.integers(0, 4)), max_size=5),
        st.sampled_from(["parts", "column", "mixed"]),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_rows_have_their_own_images_and_the_processor_s_tokens(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = make_vision_base(tmp_path_factory.mktemp(family), family)
    processor = load_processor(ModelConfig(name_or_path=str(model)))
    sizes = [(30, 20), (28, 28), (90, 31), (11, 64), (64, 11)]
    pictures = [picture(*size, seed) for seed, size in enumerate(sizes)]

    @settings(max_examples=8)
    @given(drawn=DRAWN)
    def check(drawn: list[Any]) -> None:
        folder = tmp_path_factory.mktemp("drawn")
        rows, expected = [], []
        for number, (said, how) in enumerate(drawn):
            said = [f"{number}", *said]
            content, column = [], []
            for place, it in enumerate(said):
                inline = how == "parts" or (how == "mixed" and place % 2)
                if isinstance(it, str):
                    content.append({"type": "text", "text": it, "image": None})
                elif inline:
                    content.append({"type": "image", "text": None, "image": png(pictures[it])})
                else:
                    content.append({"type": "image", "text": None, "image": None})
                    column.append(png(pictures[it]))
            rows.append({"prompt": [{"role": "user", "content": content}], "images": column, "answer": "1"})
            expected.append(said)
        message = pl.Struct({"type": pl.String, "text": pl.String, "image": pl.Binary})
        schema = {
            "prompt": pl.List(pl.Struct({"role": pl.String, "content": pl.List(message)})),
            "images": pl.List(pl.Binary),
            "answer": pl.String,
        }
        held = [{**rows[0], "prompt": [{"role": "user", "content": [{"type": "text", "text": "held"}]}], "images": []}]
        values = _values(model, folder)
        for name, its in (("train", rows), ("eval", held)):
            pl.DataFrame(its, schema).write_parquet(folder / f"{name}.parquet")
        if not any(isinstance(it, int) for said in expected for it in said):
            return
        values["data"]["checks"] = {"malformed_conversation": "error"}
        kept, pixels, screened = _screened(values, folder)
        for name, rows_ in screened.kept.items():
            write_rows(rows_, folder / f"{name}.validated.parquet")
        read = read_prompts(parse_config(values), {"train": folder / "train.validated.parquet"})
        assert read.images is not None
        lengths = []
        for place, (said, row) in enumerate(zip(expected, kept["train"].to_dicts(), strict=True)):
            own = [it for it in said if isinstance(it, int)]
            assert all(_same(pixels[n], pictures[it]) for n, it in zip(row["images"], own, strict=True))
            (message_,) = row["prompt"]
            images = iter(pictures[it] for it in own)
            given_ = [
                {**it, "image": next(images)} if it["type"] == "image" else it for it in parts(message_["content"])
            ]
            theirs = processor.apply_chat_template(
                [{"role": "user", "content": given_}], tokenize=True, add_generation_prompt=True, return_dict=True
            )["input_ids"][0]
            (placeholder,) = processor.image_token_ids
            assert [placeholder if it < 0 else it for it in read.sets["train"].ids[place]] == [*theirs]
            lengths.append(len(theirs))
        assert sorted(screened.lengths["train"]) == sorted(lengths)
        tokenizer = ImageTokenizer(show_images(folder / run_files.IMAGES, processor, read.images))
        numbered = pl.Series([_numbered(row) for row in kept["train"].to_dicts()], dtype=kept["train"].schema["prompt"])
        assert token_lengths(numbered, tokenizer).to_list() == lengths
        told = numbered.list.eval(pl.element().struct.with_fields(pl.field("content").str.replace_all(NUMBERED, "")))
        of_images = pl.Series(lengths) - token_lengths(told, tokenizer)
        assert (tokenizer.most_tokens(numbered) >= of_images).all()
        assert (_most_tokens(numbered, tokenizer, {}) >= pl.Series(lengths)).all()
        assert (
            screened.report["images"]["count"]
            == len(pixels)
            == len({it for said in expected for it in said if isinstance(it, int)})
        )

    check()


def test_an_image_is_read_and_decoded_once_and_written_once(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: Counter[bytes] = Counter()
    monkeypatch.setattr(reading, "open_image", lambda data, most: opened.update([data]) or open_image(data, most))
    read: Counter[Path] = Counter()
    bytes_of = reading._read
    monkeypatch.setattr(reading, "_read", lambda path: read.update([path]) or bytes_of(path))
    _, rows = _in_form("paths", tmp_path, [0, 1] * 20)
    again = png(picture(seed=0), "BMP")  # other bytes, the same pixels
    rows = [{**row, "prompt": _asked(str(place))} for place, row in enumerate(rows)]
    held = [{"prompt": _asked("held"), "image": again, "answer": "1"}]
    kept, pixels, screened = _screened(_values(qwen, tmp_path, rows, held), tmp_path)
    assert [*opened.values()] == [1, 1, 1]
    assert [*read.values()] == [1, 1]
    assert kept["eval"]["images"].to_list() == [[0]]
    sizes = [len(again), len(png(picture(seed=1)))]  # held-out ones come first
    figures = {"count": 2, "bytes": sum(sizes), "largest": [30, 20], "tokens": {"min": 1, "mean": 1.0, "max": 1}}
    assert screened.report["images"] == figures
    assert len(pixels) == 2
    table = pq.read_table(tmp_path / run_files.IMAGES)
    assert (
        table.drop_columns(["image"]).to_pylist() == [{"height": 20, "width": 30, "tokens": 1, "grid": [1, 2, 2]}] * 2
    )


BROKEN = {
    "no image": (b"text", r"image 0: not an image in PNG"),
    "truncated": (png(picture(90, 90))[:9000], "image 0: damaged: OSError"),
    "large": (png(Image.new("RGB", (200, 100))), "image 0: 200 × 100 pixels, and data.max_image_pixels = 10000"),
    "refused size": (png(Image.new("RGB", (801, 4))), "image 0: 801 × 4 pixels, which the model's processor refuses"),
    "missing": ({"bytes": None, "path": "gone.png"}, "gone.png': no such file"),
    "a folder": ({"bytes": None, "path": "."}, "no such file"),
    "an address": (
        {"bytes": None, "path": "https://a.b/c.png"},
        "image 0: 'https://a.b/c.png' is an address; download",
    ),
    "nothing": ({"bytes": None, "path": None}, "image 0: neither bytes nor a path"),
    "no base64": ({"bytes": None, "path": "data:image/png;base64,*"}, "image 0: base64 that cannot be decoded"),
    "a text": ({"bytes": None, "path": "data:text/plain,a"}, "is no data: URL in base64"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_image_is_named_with_its_reason_or_dropped(qwen: Path, tmp_path: Path, name: str) -> None:
    image, said = BROKEN[name]
    rows = [
        {"prompt": row["prompt"], "images": [{"bytes": row["image"], "path": None}], "answer": "1"}
        for row in _rows(range(4))
    ]
    rows[2]["images"] = [image if isinstance(image, dict) else {"bytes": image, "path": None}]
    values = _values(qwen, tmp_path, rows)
    values["data"]["max_image_pixels"] = 10_000
    screened = screen(parse_config(values))
    assert screened.refused
    assert screened.findings.select("dataset", "row", "column", "check").rows() == [
        ("train", 2, "images", "broken_image")
    ]
    assert said in screened.findings["value"][0].replace("'[a] *", "")
    assert said in refusal(screened) and "data.checks.broken_image = 'drop'" in refusal(screened)
    values["data"]["checks"] = {"broken_image": "drop"}
    screened = screen(parse_config(values))
    assert not screened.refused
    assert _in_order(screened.kept["train"]) == [[0], [1], [2]]
    assert screened.dropped["train"]["broken_rules"].to_list() == ["broken_image"]


def test_prompts_with_too_many_images_or_places_for_others_are_found(qwen: Path, tmp_path: Path) -> None:
    one = {"bytes": png(picture()), "path": None}
    said = {
        0: (_asked("five"), [one] * 5, "too_many_images", "5 images, and data.max_images = 4"),
        1: (_asked(f"{MARK}{MARK}"), [one], "malformed_conversation", "1 images, and 2 places for one in the messages"),
        2: (_asked(f"{MARK}"), [], "malformed_conversation", "0 images, and 1 places for one in the messages"),
        3: (_asked("<|image_pad|>"), [one], "malformed_conversation", "a message says '<|image_pad|>', which stands"),
        4: (_asked("four"), [one] * 4, None, ""),
        5: (_asked("<|image_pad|> without an image"), [], None, ""),
    }
    rows = [{"prompt": prompt, "images": given, "answer": "1"} for prompt, given, _, _ in said.values()]
    values = _values(qwen, tmp_path, rows)
    values["data"]["max_images"] = 4
    found = screen(parse_config(values)).findings
    assert found.select("row", "check").rows() == [(row, rule) for row, (_, _, rule, _) in said.items() if rule]
    for row, value in found.select("row", "value").rows():
        assert said[row][3] in value
    values["data"]["checks"] = {"too_many_images": "drop", "malformed_conversation": "drop"}
    screened = screen(parse_config(values))
    assert _in_order(screened.kept["train"]) == [[0] * 4, []]


def test_prompts_are_the_same_only_with_the_same_pixels(qwen: Path, tmp_path: Path) -> None:
    asked = _asked("What is it?")
    seeds, held = [0, 1, 0, 2, 3], [4, 2]
    train = [{"prompt": asked, "image": png(picture(seed=seed)), "answer": "1"} for seed in seeds]
    train[4]["prompt"] = _asked("what is  it?")
    rows = [{"prompt": asked, "image": png(picture(seed=seed), "BMP"), "answer": "1"} for seed in [*held, 3]]
    found = screen(parse_config(_values(qwen, tmp_path, train, rows))).findings
    assert sorted(found.select("row", "check").rows()) == [
        (2, "duplicate_prompt"),
        (3, "overlap"),
        (4, "near_overlap"),
    ]


def test_a_prompt_that_is_too_long_by_its_images_is_found(qwen: Path, tmp_path: Path) -> None:
    rows = _rows(range(4))
    rows[1]["image"] = png(picture(300, 300))  # 9 tokens, the most that this processor gives a square
    values = _values(qwen, tmp_path, rows)
    lengths = sorted(screen(parse_config(values)).lengths["train"])
    assert lengths[-1] == lengths[0] + 8
    config = json.loads((qwen / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = lengths[-1] - 1 + 6
    model = make_vision_base(tmp_path / "short", "qwen2_5_vl")
    (model / "config.json").write_text(json.dumps(config))
    values["model"]["name_or_path"] = str(model)
    found = screen(parse_config(values)).findings
    assert found.select("row", "check").rows() == [(1, "long_prompt")]


def test_a_run_may_mix_sources_with_images_and_without(qwen: Path, tmp_path: Path) -> None:
    values = _values(qwen, tmp_path)
    del values["data"]
    for name, seeds in (("shown", range(4)), ("told", range(20, 24))):
        for kind, its in (("train", seeds), ("eval", [it + 10 for it in seeds])):
            rows = _rows(its)
            frame = pl.DataFrame(rows if name == "shown" else [{**row, "image": None} for row in rows])
            frame = frame if name == "shown" else frame.drop("image")
            frame.write_parquet(tmp_path / f"{name}.{kind}.parquet")
    values["data"] = {
        "sources": [
            {"name": name, **{kind: str(tmp_path / f"{name}.{kind}.parquet") for kind in ("train", "eval")}}
            for name in ("told", "shown")
        ]
    }
    kept, _, _ = _screened(values, tmp_path)
    assert kept["eval"]["images"].to_list() == [*[[]] * 4, [0], [1], [2], [3]]
    assert kept["train"]["images"].to_list() == [*[[]] * 4, [4], [5], [6], [7]]


def test_validate_leaves_the_images_beside_the_prompts(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    log = SimpleNamespace(info=lambda text, *words: said.append(text % words), warning=lambda *_: None)
    monkeypatch.setattr(validate, "get_run_logger", lambda: log)
    monkeypatch.setattr(validate, "show_markdown", lambda _, page, __: said.append(page))
    monkeypatch.setattr(validate, "rehearse_version", lambda *_: None)
    monkeypatch.setattr(validate, "_rehearse", lambda _: {"zero_or_one": [], "warnings": [], "rows": 0})
    monkeypatch.setattr(data_report, "_rehearsal_table", lambda _: "")
    rows = _rows(range(4))
    values = _values(qwen, tmp_path, [*rows, {**rows[0], "prompt": _asked("broken"), "image": b"no image"}])
    (partial := tmp_path / "dataset.partial").mkdir()
    context = Context(parse_config(values), tmp_path, partial)
    with pytest.raises(StageError, match="image 0: not an image in PNG"):
        validate._work(context)
    assert not (partial / run_files.IMAGES).exists()
    values["data"]["checks"] = {"broken_image": "drop"}
    report = validate._work(Context(parse_config(values), tmp_path, partial))
    files = VALIDATE.files(context.config, report)
    assert [*files] == ["train.parquet", "eval.parquet", run_files.IMAGES]
    assert {*files, "report.json", "train.dropped.parquet"} <= {it.name for it in partial.iterdir()}
    assert any(text.startswith("7 different images, ") for text in said)
    assert any("## Images\n\n7 different images, " in text for text in said)
    before = VALIDATE.content(partial, report)
    monkeypatch.undo()
    (partial / run_files.IMAGES).write_bytes(b"others")
    assert before["train"] != VALIDATE.content(partial, report)["train"]


def test_a_plan_counts_the_images_of_the_first_prompts(qwen: Path, tmp_path: Path) -> None:
    rows = _rows(range(4))
    rows[2]["image"] = png(picture(300, 300))
    rows[3]["image"] = b"no image"
    values = _values(qwen, tmp_path, rows)
    found = first_lengths(parse_config(values))
    assert found is not None
    text = len("How many in 0?")
    assert (found.mean, found.longest) == (text + (1 + 1 + 9 + 0) / 4, text + 9)


def test_a_data_check_says_which_images_there_are(qwen: Path, tmp_path: Path) -> None:
    values = _values(qwen, tmp_path)
    (tmp_path / "run.toml").write_text(dump_config(parse_config(values)))
    result = CliRunner().invoke(app, ["data", "check", str(tmp_path / "run.toml")])
    assert result.exit_code == 0, result.output
    assert "7 different images, 0.0 MiB, the largest 30 × 20 pixels, in 1 to 1 tokens each" in result.output


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"rollout": {"engine": "vllm"}}, "rollout.engine = 'vllm': not with images yet"),
        ({"rollout": {"engine": "auto"}}, "rollout.engine = 'auto': not with images yet"),
        ({"train": {"sharding": "full", "num_processes": 2}}, "train.sharding = 'full': not with images yet"),
        ({"environment": {"tools": ["calculator"]}}, "environment: not with images yet"),
    ],
)
def test_what_does_not_work_with_images_yet_is_refused(
    qwen: Path, words_model: Path, tmp_path: Path, keys: Row, said: str
) -> None:
    values = _values(qwen, tmp_path)
    for section, own in keys.items():
        values[section] = values.get(section, {}) | own
    config = parse_config(values)
    (found,) = screen(config).shape
    assert found.startswith(said)
    with pytest.raises(ConfigError, match=re.escape(said)):
        early_refusals._check_images(config)
    early_refusals._check_images(parse_config(_values(words_model, tmp_path) | {"rollout": {"engine": "vllm"}}))


def test_columns_that_are_no_images_are_refused(qwen: Path, tmp_path: Path) -> None:
    for column, value, said in (
        ("image", 5, "train, column 'image': its type is Int64; an image is a path, bytes"),
        ("images", [{"x": 1}], "train, column 'images': its type is List"),
    ):
        rows = [{"prompt": _asked(f"{n}"), column: value, "answer": "1"} for n in range(3)]
        assert screen(parse_config(_values(qwen, tmp_path, rows))).shape[0].startswith(said)
    rows = [{**row, "images": [row["image"]]} for row in _rows(range(3))]
    assert "has the columns 'images' and 'image'" in screen(parse_config(_values(qwen, tmp_path, rows))).shape[0]
    text = [{**row, "prompt": "How many?"} for row in _rows(range(3))]
    (said,) = screen(parse_config(_values(qwen, tmp_path, text, _rows([9])))).shape
    assert said == (
        'the prompts of train are text, and images stand in messages: data.system_prompt = "" makes messages of text'
    )


def test_a_model_that_reads_text_alone_leaves_images_or_is_refused(words_model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": _asked(f"How many {n}?"), "image": png(picture()), "answer": "1"} for n in range(3)]
    values = _values(words_model, tmp_path, rows, [{**rows[0], "prompt": _asked("Who?")}])
    screened = screen(parse_config(values))
    assert not screened.refused and "images" not in screened.report
    assert f"train: its images are not read, since {str(words_model)!r} reads text alone" in screened.notes
    values["data"]["columns"] = {"images": "image"}
    with pytest.raises(ConfigError, match=r"the data have images, and a .* reads text alone"):
        screen(parse_config(values))
    del values["data"]["columns"]
    content = [{"type": "text", "text": "a"}, {"type": "image", "text": None}]
    shown = [{**rows[0], "prompt": [{"role": "user", "content": content}]}]
    with pytest.raises(ConfigError, match=r"the data have images, and a .* reads text alone"):
        screen(parse_config(_values(words_model, tmp_path, shown, rows[1:])))
    told = [
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": f"How many {n}"}]}], "answer": "1"}
        for n in range(4)
    ]
    screened = screen(parse_config(_values(words_model, tmp_path, told[:3], told[3:])))
    assert not screened.refused
    assert screened.kept["train"].columns == ["prompt", "answer"]
    assert screened.kept["train"]["prompt"][0].to_list() == _asked("How many 0")


def test_images_of_a_data_set_of_the_hub_are_its_own(tmp_path: Path) -> None:
    writer = reading.ImageWriter(tmp_path / "images.parquet", None, 100)
    (folder := tmp_path / "cache").mkdir()
    with pytest.raises(reading.ImageError, match=r"is not in the data set; a data set of the hub holds its images"):
        writer.number({"bytes": None, "path": "../secret.png"}, folder, within=True)
    with pytest.raises(reading.ImageError, match=r"secret\.png': no such file"):
        writer.number({"bytes": None, "path": "../secret.png"}, folder, within=False)
    writer.close()
