"""Demonstrations from a finished run: its training's right completions, as a plain selection from what it sampled."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from flows.parameters.early_refusals import count_demonstrations, refuse_early
from grpo_core.config.files import dump_config, parse_config
from grpo_core.data.recording import KEY
from grpo_core.errors import GrpoError
from grpo_core.training.loop import train
from tasks import screen
from tasks.data.demonstrations import write_demonstrations
from tasks.data.sources import SourceError
from tasks.stages.lineage import lineage_keys
from tests.conftest import config_values, make_run, make_tokenizer, with_keys, write_data
from tests.grpo_core.training.training import plan_demonstrations

SHORT = "tests.tasks.test_warm_start_from_run:short"


def short(prompts: list[str], completion_ids: list[list[int]]) -> list[float | None]:
    """Right, with 2.0, are up to three tokens, and all that begin with an even one; 1.0 is half right. Does not apply
    to every fifth prompt."""
    pairs = zip(prompts, completion_ids, strict=True)
    return [
        None if int(prompt[1]) % 5 == 0 else 2.0 if len(ids) <= 3 or ids[0] % 2 == 0 else 1.0 for prompt, ids in pairs
    ]


@pytest.fixture(scope="module")
def trained(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six generation batches, three passes over eight prompts."""
    folder = tmp_path_factory.mktemp("trained")
    values = config_values(model_folder, folder, max_steps=6, learning_rate=3e-3)
    values["rewards"] = [values["rewards"][1], {"function": SHORT, "name": "short", "range": [0.0, 2.0]}]
    values["evaluation"] = {"accuracy_reward": "short"}
    run = make_run(folder / "run", values, 8)
    train(run, run / "training")
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(trained, tmp_path / "trained")


@pytest.fixture
def values(model_folder: Path, run: Path, tmp_path: Path) -> dict[str, Any]:
    write_data(tmp_path)
    return {**config_values(model_folder, tmp_path), "warm_start": {"demonstrations": str(run), "batch_size": 4}}


def _files(run: Path) -> list[Path]:
    return sorted((run / "training" / "completions").iterdir())


def _selected(run: Path) -> list[dict[str, Any]]:
    """What a plain loop over all samples selects, with the prompts."""
    end, found = make_tokenizer().eos_token_id, dict[tuple[Any, ...], dict[str, Any]]()
    for sample in [row for file in _files(run) for row in pq.read_table(file).to_pylist()]:
        ids = sample["completion_ids"]
        is_right = sample["prompt"][1] not in "05" and (len(ids) <= 3 or ids[0] % 2 == 0)
        if is_right and ids[-1] == end:
            row = {"prompt_ids": sample["prompt_ids"], "completion_ids": ids, "trained_tokens": [1] * len(ids)}
            found.setdefault((sample["prompt"], *ids), {"prompt": sample["prompt"], **row})
    return [*found.values()]


def _written(values: dict[str, Any], folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    config = parse_config(values)
    held_out = {"eval": screen.screen(config).kept["eval"]}
    figures = write_demonstrations(config, lambda row: [], held_out, folder / "found.parquet")
    return figures, pq.read_table(folder / "found.parquet").to_pylist()


def _without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


@pytest.mark.slow
def test_demonstrations_of_a_run_are_its_right_completions_once_each_as_they_were_sampled(
    values: dict[str, Any], run: Path, tmp_path: Path
) -> None:
    samples = [row for file in _files(run) for row in pq.read_table(file).to_pylist()]
    expected = [_without(row, "prompt") for row in _selected(run)]
    right = [row for row in samples if row["rewards/short"] == 2.0]
    whole = [row for row in right if not row["truncated"]]
    assert len(samples) > len(right) > len(whole) > len(expected) > 8, "each rule leaves something out"
    figures, found = _written(values, tmp_path)
    assert found == expected
    assert (figures["rows"], figures["dropped"]) == (len(expected), 0)
    assert count_demonstrations(parse_config(values)) == len(expected), "what the plan counts"
    warm = make_run(tmp_path / "warm", values)
    shutil.move(tmp_path / "found.parquet", warm / "dataset" / "demonstrations.parquet")
    plan_demonstrations(warm, len(expected))
    result = train(warm, warm / "warm-start", warm_start=True)
    assert result["counted"]["updates"] == len(expected) // 4


@pytest.mark.slow
def test_of_a_conversation_the_recorded_mask_says_which_tokens_are_trained(
    values: dict[str, Any], run: Path, tmp_path: Path
) -> None:
    for file in _files(run):
        table = pq.read_table(file)
        masks = [
            [len(ids) % 2 ^ place % 2 for place, _ in enumerate(ids)] for ids in table["completion_ids"].to_pylist()
        ]
        pq.write_table(table.append_column("trained_tokens", pa.array(masks, pa.large_list(pa.int8()))), file)
    found = _written(values, tmp_path)[1]
    several = [row["trained_tokens"] for row in found if len(row["completion_ids"]) > 1]
    assert several and all(mask == [len(mask) % 2 ^ place % 2 for place, _ in enumerate(mask)] for mask in several)


@pytest.mark.slow
def test_right_completions_of_held_out_prompts_are_refused_or_dropped(
    values: dict[str, Any], run: Path, tmp_path: Path
) -> None:
    rows = _selected(run)
    held_out = rows[0]["prompt"]
    shown = sum(row["prompt"] == held_out for row in rows)
    place = pq.read_table(run / "dataset" / "train.parquet")["prompt"].to_pylist().index(held_out)
    table = pq.read_table(tmp_path / "eval.parquet")
    asked = pa.array([held_out, *table["prompt"].to_pylist()[1:]])
    pq.write_table(table.set_column(table.column_names.index("prompt"), "prompt", asked), tmp_path / "eval.parquet")
    with pytest.raises(
        SourceError, match=rf"{shown} of {len(rows)} right .*\n  row {place} of .*: its prompt is a held"
    ):
        _written(values, tmp_path)
    values["data"]["checks"] = {"near_overlap": "drop"}
    figures, found = _written(values, tmp_path)
    assert found == [_without(row, "prompt") for row in rows if row["prompt"] != held_out]
    assert figures["dropped"] == shown
    values["data"]["checks"] = {"near_overlap": "warn"}
    assert len(_written(values, tmp_path)[1]) == len(rows)


def _unfinished(run: Path) -> None:
    (run / "training").rename(run / "training.partial")


def _cut(run: Path) -> None:
    file = _files(run)[2]
    file.write_bytes(file.read_bytes()[:-100])


def _damaged(run: Path) -> None:
    """A fault among the tokens, which the file's footer does not show."""
    file = _files(run)[2]
    content = bytearray(file.read_bytes())
    chunk = next(
        column
        for column in map(pq.read_metadata(file).row_group(0).column, range(99))
        if column.path_in_schema.startswith("completion_ids")
    )
    start = min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)))
    content[start : start + 40] = bytes(40)
    file.write_bytes(content)


def _older(run: Path) -> None:
    pq.write_table(pq.read_table(_files(run)[0]).drop_columns(["prompt_ids"]), _files(run)[0])


def _with_config(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    import tomllib

    values = tomllib.loads((run / "config.toml").read_text())
    change(values)
    (run / "config.toml").write_text(dump_config(parse_config(values)))


def _other_tokenizer(run: Path) -> None:
    for file in _files(run):
        table = pq.read_table(file)
        facts = json.loads(table.schema.metadata[KEY]) | {"vocabulary": "another"}
        pq.write_table(table.replace_schema_metadata({KEY: json.dumps(facts)}), file)


def _of_a_source(run: Path) -> None:
    table = pq.read_table(_files(run)[1])
    pq.write_table(table.append_column("source", pa.array(["sums"] * len(table))), _files(run)[1])


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "unfinished": (_unfinished, r"trained' has no finished training: first run: grpo run .*config\.toml"),
    "missing file": (lambda run: _files(run)[3].unlink(), "completions has 5 files of 6 generation batches; put"),
    "cut file": (_cut, r"rollout-000002\.parquet cannot be read: .*; put it back, or name another run"),
    "damaged file": (_damaged, r"rollout-000002\.parquet cannot be read: .*; put it back, or name another run"),
    "older file": (_older, "rollout-000000.parquet lacks prompt_ids: it is of an older version"),
    "other rewards": (
        lambda run: _with_config(run, lambda values: values["rewards"][0].update(name="other")),
        r"lacks rewards/other: it is .* or of other rewards than config\.toml has",
    ),
    "other sources": (_of_a_source, r"rollout-000001\.parquet has completions of a source 'sums', unlike its config"),
    "older configuration": (
        lambda run: (run / "config.toml").write_text((run / "config.toml").read_text() + "\n[gone]\nkey = 1\n"),
        r"trained/config\.toml is not valid: gone: unknown key",
    ),
    "no range": (
        lambda run: _with_config(run, lambda values: values["rewards"][1].pop("range")),
        "not known, since its accuracy reward 'short' has no range; give it range = .* in .*config.toml",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_that_gives_no_demonstrations_is_refused_before_it_begins(
    fault: str, values: dict[str, Any], run: Path
) -> None:
    refuse_early(parse_config(values))
    damage, said = FAULTS[fault]
    damage(run)
    with pytest.raises(GrpoError, match=said):
        refuse_early(parse_config(values))


@pytest.mark.slow
def test_a_run_of_another_tokenizer_the_run_itself_and_too_few_right_completions_are_refused(
    values: dict[str, Any], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = len(_selected(run))
    values["warm_start"]["batch_size"] = number + 1
    with pytest.raises(GrpoError, match=rf"batch_size={number + 1} with {number} right completions in the run '"):
        refuse_early(parse_config(values))
    values["warm_start"]["batch_size"] = 4
    for key, value in (("split", "test"), ("revision", "main")):
        with pytest.raises(SourceError, match=f"neither splits nor revisions: remove warm_start.{key}='{value}'"):
            refuse_early(parse_config({**values, "warm_start": {**values["warm_start"], key: value}}))
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "trained").symlink_to(run)
    with pytest.raises(SourceError, match="is the folder of this run, whose training would replace it"):
        refuse_early(parse_config({**values, "name": "trained"}))
    _other_tokenizer(run)
    with pytest.raises(SourceError, match=r"has token ids of another vocabulary than that of .*, by the model '.*'"):
        _written(values, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["training", "training/completions", "training/completions/rollout-000000.parquet"])
def test_a_part_of_a_run_is_refused_by_the_name_of_the_run(values: dict[str, Any], run: Path, part: str) -> None:
    values["warm_start"]["demonstrations"] = str(run / part)
    with pytest.raises(SourceError, match=rf"is a part of a run: .* name the run, .*{run.name}"):
        write_demonstrations(parse_config(values), lambda row: [], {}, run / "found.parquet")


@pytest.mark.slow
def test_completions_that_would_not_end_in_the_new_run_are_refused(
    values: dict[str, Any], run: Path, model_folder: Path, tmp_path: Path
) -> None:
    """They end with a token that does not end the turn of the new base, or by another text."""
    stopped = {**values, "rollout": {**values["rollout"], "stop": ["7"]}}
    with pytest.raises(SourceError, match=r"has rollout\.stop=\[\], and this run \['7'\]: .* set it to the same"):
        _written(stopped, tmp_path)
    base = shutil.copytree(model_folder, tmp_path / "base")
    other = next(token for token in make_tokenizer().get_vocab() if token.isdigit())
    tokenizer = make_tokenizer()
    tokenizer.eos_token = other
    tokenizer.save_pretrained(base)
    generation = json.loads((base / "generation_config.json").read_text())
    (base / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": tokenizer.eos_token_id}))
    values["model"]["name_or_path"] = str(base)
    with pytest.raises(SourceError, match=rf"it ends with '.*', and a completion of this model with '{other}'; name"):
        _written(values, tmp_path)


@pytest.mark.slow
def test_the_run_s_own_modules_do_not_become_importable(values: dict[str, Any], run: Path) -> None:
    (run / "rewards").mkdir()
    (run / "rewards" / "former_own.py").write_text("raise AssertionError")
    _with_config(run, lambda values: values["rewards"][1].update(function="former_own:short"))
    refuse_early(config := parse_config(values))
    lineage_keys(config)
    assert find_spec("former_own") is None


@pytest.mark.slow
def test_the_warm_start_is_done_again_if_other_completions_or_others_are_right(
    values: dict[str, Any], run: Path
) -> None:
    def keys() -> dict[str, str]:
        return {name: key for name, key in lineage_keys(parse_config(values)).items() if name != "registration"}

    before = keys()
    _with_config(run, lambda values: values.update(with_keys(values, learning_rate=1.0)))
    run.rename(run.with_name("moved"))
    values["warm_start"]["demonstrations"] = str(run.with_name("moved"))
    assert keys() == before, "neither its name nor its other keys count"
    moved = run.with_name("moved")
    _with_config(moved, lambda values: values["rewards"][1].update(range=[0.0, 1.0]))
    of_range = keys()
    assert all(of_range[name] != before[name] for name in ("validate", "warm-start", "train"))
    file = _files(moved)[0]
    table = pq.read_table(file)
    pq.write_table(table.filter(pc.field("truncated")), file)
    assert all(keys()[name] != of_range[name] for name in ("validate", "warm-start", "train"))
