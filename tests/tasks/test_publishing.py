"""What an export is said to be worth, its card, and the hub, by a stand-in."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from huggingface_hub import ModelCard
from hypothesis import given
from hypothesis import strategies as st

from flows.parameters.early_refusals import refuse_early
from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from grpo_core.evaluation.statistics import BINARY, paired_difference
from tasks.publishing.card import write_card
from tasks.publishing.formats import check_formats
from tasks.publishing.hub import check_hub, push, repository_of
from tasks.publishing.verdict import rows, verdict
from tasks.stages.errors import StageError
from tasks.stages.lineage import lineage_keys
from tests.conftest import config_values
from tests.made_up import made_up_run, metrics_of, outcomes_of, samples_of, values_of
from tests.stand_in_hub import TOKEN, Hub, hub


def _report(before: list[int], after: list[int]) -> dict[str, Any]:
    found = paired_difference(before, after, 0.95, BINARY)
    means = {name: sum(values) / len(values) for name, values in (("trained", before), ("exported", after))}
    counts = {"units": "prompts", "answers": len(before), "equal": 0}
    return {"metric": "accuracy", "sets": {"held-out": {"difference": asdict(found), **counts, **means}}}


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=200), st.floats(0, 0.3))
def test_an_export_is_kept_if_and_only_if_the_whole_interval_is_above_the_drop(
    pairs: list[tuple[int, int]], max_drop: float
) -> None:
    report = _report(*map(list, zip(*pairs, strict=True)))
    low, high = (report["sets"]["held-out"]["difference"][end] for end in ("low", "high"))
    kept, sentence = verdict(report, max_drop)
    assert kept == (low >= -max_drop)
    assert sentence.startswith("worse") == (not kept and high < 0)
    assert sentence.startswith("not shown") == (not kept and high >= 0)


def test_few_prompts_without_any_difference_are_no_proof() -> None:
    kept, sentence = verdict(_report([1] * 20, [1] * 20), 0.02)
    assert not kept
    assert sentence.startswith("not shown to lose at most 2.0 points: accuracy +0.0 points [-16.1, 16.1] on 20 prompts")
    assert verdict(_report([1] * 200, [1] * 200), 0.02)[0]


def test_the_table_has_a_row_for_each_set_and_one_for_unchanged_files() -> None:
    report = _report([1] * 200, [1] * 199 + [0])
    head, same, other = rows({"huggingface": {"sets": {}}, "int8": report})
    assert len(head) == len(same) == len(other)
    assert other[:5] == ["int8", "held-out", "accuracy", "100.0%", "99.5%"]


def _config(**publish: Any) -> RunConfig:
    return parse_config(values_of("sums", publish={"formats": ["huggingface", "int8"], **publish}))


def test_a_card_says_what_the_run_says_and_its_metadata_is_the_hub_s(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: other\nlicense_name: theirs\n---\n# A base\n")
    (base / "config.json").write_text("{}")
    values = values_of("sums", model={"name_or_path": str(base)}, data={"train": "ada/sums", "eval": "/ours/eval.csv"})
    values["rollout"]["stop"] = ["\n"]
    samples = samples_of({"base": outcomes_of(0, 0.2), "trained": outcomes_of(1, 0.9)})
    run = made_up_run(tmp_path / "run", values, samples, metrics_of())
    export = {"verdict": "worse", "kept": False, **_report([1] * 60, [1] * 30 + [0] * 30)}
    write_card(run / "README.md", run, parse_config(values), export, "abc123", "ada/sums-model")
    card = ModelCard.load(run / "README.md")
    assert card.data.license == "other"
    assert card.data.to_dict()["license_name"] == "theirs"
    assert card.data.datasets == ["ada/sums"]
    assert card.data.base_model is None, "a folder of this machine is no model of the hub"
    [result] = card.data.eval_results
    assert (result.metric_type, result.metric_value) == ("accuracy", 0.5)
    for part in ("Better than the base", "This export is worse.", "numeric", "theirs", "abc123", r"9\,000", "eval"):
        assert part in card.text
    assert "stop_strings=['\\n']" in card.text
    assert str(tmp_path) not in card.content
    assert "/ours" not in card.content


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub(found := Hub()) as address:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield found


def test_an_export_is_pushed_whole_into_a_private_repository(stand_in: Hub, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)))
    config = _config(hub_repository="ada/sums")
    check_hub(config)
    name = repository_of(config.publish, "int8")
    stand_in.files[name] = {"LICENSE": b"theirs", "model-2.safetensors": b"of an earlier export"}
    assert push(tmp_path, name, "version 3").endswith("/ada/sums-int8/commit/1")
    pushed = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert stand_in.files[name] == pushed | {"LICENSE": b"theirs"}
    assert [made.get("private", made.get("visibility")) for made in stand_in.made] in ([True], ["private"])
    check_hub(config)  # now that it is there


@pytest.mark.parametrize(
    ("repository", "token", "role", "said"),
    [
        ("ada/a--b", TOKEN, "write", "Cannot have -- or .."),
        ("sums", TOKEN, "write", "names no owner; write OWNER/NAME"),
        ("bob/sums", TOKEN, "write", "may not make it for 'bob': it may for ada"),
        ("ada/sums", TOKEN, "read", "may only read"),
        ("ada/sums", "hf_wrong", "write", "Invalid user token"),
        ("ada/sums", "", "write", "there is no token of the hub: export HF_TOKEN"),
    ],
)
def test_what_the_hub_would_not_take_at_the_end_is_refused_at_the_start(
    stand_in: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, repository: str, token: str, role: str, said: str
) -> None:
    stand_in.role = role
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError) as raised:
        check_hub(_config(hub_repository=repository))
    assert said in str(raised.value)
    assert not (token and token in str(raised.value))
    assert not [asked for asked in stand_in.asked if asked.startswith("POST")]


def test_a_hub_that_cannot_be_reached_is_said_in_a_sentence(stand_in: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://ada:secret@{address}")
        with pytest.raises(ConfigError, match=r"ada/sums: the hub \(http://127\.0\.0\.1:\d+\) does not take it or"):
            check_hub(_config(hub_repository="ada/sums"))
        with pytest.raises(StageError, match="does not take it or does not answer"):
            push(Path("nowhere"), "ada/sums", "")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids to ask the hub"):
        check_hub(_config(hub_repository="ada/sums"))


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("", "it is not set"),
        ("/no/such/python", "No such file"),
        (sys.executable, "llmcompressor is not installed there"),
    ],
)
def test_a_run_is_not_started_whose_codes_nothing_could_make(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, python: str, said: str
) -> None:
    monkeypatch.setenv("GRPO_QUANTIZE_PYTHON", python)
    config = parse_config({**config_values(model_folder, tmp_path), "publish": {"formats": ["int4"]}})
    with pytest.raises(ConfigError, match=r"publish\.formats has 'int4', which llm-compressor makes") as raised:
        refuse_early(config)
    assert said in str(raised.value)


def test_what_servers_could_not_evaluate_is_refused_before_the_training(tmp_path: Path, model_folder: Path) -> None:
    values = config_values(model_folder, tmp_path, engine="vllm-server", mixed_precision="no")
    check_formats(parse_config({**values, "publish": {"formats": ["huggingface"]}}))
    with pytest.raises(ConfigError, match="has 'bfloat16', which is evaluated in bfloat16, and vLLM servers"):
        check_formats(parse_config({**values, "publish": {"formats": ["huggingface", "bfloat16"]}}))


@pytest.mark.parametrize(
    ("publish", "said"),
    [
        ({"hub_repository": "ada/sums"}, "without formats"),
        ({"formats": ["int8"], "hub_repository": "ada/a", "sweep": "lr"}, "each arm would overwrite"),
        ({"formats": ["int8", "int8"]}, "names a format twice"),
        ({"formats": ["gguf"]}, "convert that folder by llama.cpp's convert_hf_to_gguf.py"),
        ({"formats": ["fp8"]}, "'huggingface', 'bfloat16', 'int8' or 'int4'"),
    ],
)
def test_a_section_that_exports_nothing_or_twice_is_refused(publish: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        registry = {"sweep": publish.pop("sweep")} if "sweep" in publish else {}
        parse_config(values_of("sums", publish=publish, registry=registry))


def test_exports_are_made_again_alone_if_their_keys_change() -> None:
    before, after = (lineage_keys(_config(max_drop=drop)) for drop in (0.02, 0.1))
    assert [stage for stage in before if before[stage] != after[stage]] == ["publish"]
    plain = lineage_keys(parse_config(values_of("sums")))
    assert plain == {stage: key for stage, key in before.items() if stage != "publish"}
