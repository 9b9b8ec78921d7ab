"""The form that Prefect shows for the pipeline: each key of a configuration, and what a filled-in form means."""

from __future__ import annotations

import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect.runtime import flow_run
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import validate

from benchmarks.command import python_path
from flows.cli.init import write_project
from flows.parameters.form import FIRST, add_changes, changes_from_overrides, configs, presets, read_name, resolve
from flows.pipeline import pipeline
from flows.promotion import promote
from flows.sweep import sweep
from grpo_core.config.files import describe_keys, load_config, parse_config
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from tests.quick_python import quick_python

pytestmark = pytest.mark.served

SCHEMA = parameter_schema(pipeline).model_dump_for_openapi()
SECTIONS = {
    **SCHEMA["properties"]["changes"],
    "properties": {k: v for k, v in SCHEMA["properties"]["changes"]["properties"].items() if k not in FIRST},
}
ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.toml"
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "enum", "minItems", "pattern"}


def _walk(form: dict[str, Any], prefix: str = "") -> dict[str, dict[str, Any]]:
    """Each key of the form with its field."""
    fields = {}
    for name, field in form["properties"].items():
        inner = field.get("items", field)
        fields |= _walk(inner, f"{prefix}{name}.") if "properties" in inner else {f"{prefix}{name}": field}
    return fields


def _model_fields() -> dict[str, dict[str, Any]]:
    """Each key of the configuration with its JSON schema."""
    root = RunConfig.model_json_schema()

    def walk(schema: dict[str, Any], prefix: str) -> dict[str, dict[str, Any]]:
        fields = {}
        for name, field in schema["properties"].items():
            inner = field.get("items", field).get("$ref", "").rsplit("/", 1)[-1]
            fields |= walk(root["$defs"][inner], f"{prefix}{name}.") if inner else {f"{prefix}{name}": field}
        return fields

    return walk(root, "")


def test_the_form_has_every_key_with_its_meaning_default_bounds_and_choices() -> None:
    form, model = _walk(SECTIONS), _model_fields()
    assert list(form) == [key for key, *_ in describe_keys()] == list(model)
    for key, default, _, meaning in describe_keys():
        assert form[key]["description"].startswith(meaning) and meaning
        assert f"Default: {default}." in form[key]["description"] or default in ("required", "", "null")
        schemas = model[key].get("anyOf", [model[key]])
        promised = {name: value for schema in schemas for name, value in schema.items() if name in BOUNDS}
        if key == "name":
            del promised["pattern"]  # here it may also contain {date}
        assert promised.items() <= form[key].items()


def test_the_form_of_a_promotion_has_its_rules_and_nothing_else() -> None:
    form = parameter_schema(promote).model_dump_for_openapi()["properties"]["changes"]
    rules = [key for key, *_ in describe_keys() if key.startswith("promotion.")]
    assert list(_walk(form)) == rules
    guards = form["properties"]["promotion"]["properties"]["guards"]
    assert guards["type"] == "array"
    assert guards["description"].endswith("A value here replaces the whole list.")
    assert guards["items"]["required"] == ["metric"]


def test_the_form_begins_with_what_most_runs_change_and_says_whose_name_counts() -> None:
    fields = SCHEMA["properties"]["changes"]["properties"]
    in_order = sorted(fields, key=lambda name: fields[name]["position"])
    assert in_order[:11] == ["name", *FIRST]
    assert in_order[11:16] == ["model", "data", "rewards", "rollout", "train"]
    assert in_order[-3:] == ["seed", "algorithm", "health"]
    assert len({fields[name]["position"] for name in fields}) == len(fields)
    whole = _walk(SECTIONS)
    for key in FIRST:
        assert fields[key]["title"] == key
        assert fields[key]["description"] == whole[key]["description"]
    assert fields["name"]["description"].endswith("Prefect's run gets this name too, whatever its Run Name says.")


def test_the_form_of_a_sweep_begins_with_what_makes_it_a_sweep() -> None:
    fields = parameter_schema(sweep).properties
    in_order = sorted(fields, key=lambda name: fields[name]["position"])
    assert in_order == ["preset", "grid", "seeds", "name", "stop_early", "optuna", "ranges", "changes"]


def test_an_empty_field_is_sent_as_nothing() -> None:
    """Prefect fills in a default by itself, asks which type a union shall have, and sends false for a switch."""
    for key, field in _walk(SCHEMA["properties"]["changes"]).items():
        assert not {"default", "anyOf", "$ref"} & field.keys(), key
        assert field.get("type") != "boolean", key
    assert "required" not in SCHEMA
    assert SCHEMA["properties"]["changes"]["default"] == {}
    assert not validate({"preset": presets()[0], "changes": {}}, SCHEMA, preprocess=False)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "seed": st.integers(0, 2**31 - 1),
            "name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True),
            "train": st.fixed_dictionaries(
                {}, optional={"max_steps": st.integers(1, 9), "learning_rate": st.floats(1e-6, 1, exclude_min=True)}
            ),
            "algorithm": st.fixed_dictionaries({}, optional={"loss_type": st.sampled_from(["grpo", "dapo"])}),
            "model": st.fixed_dictionaries({}, optional={"use_peft": st.booleans()}),
        },
    )
)
def test_changes_mean_what_set_means(changes: dict[str, Any]) -> None:
    flat = {f"{s}.{k}": v for s, keys in changes.items() if isinstance(keys, dict) for k, v in keys.items()}
    flat |= {key: value for key, value in changes.items() if not isinstance(value, dict)}
    sets = [f"{key}={str(value).lower() if isinstance(value, bool) else repr(value)}" for key, value in flat.items()]
    path = configs() / "quickstart.toml"
    assert not validate({"preset": "quickstart", "changes": changes}, SCHEMA)
    assert resolve("quickstart", changes) == resolve(str(path), changes) == load_config(path, sets)
    assert resolve("quickstart", changes_from_overrides(path, sets)) == load_config(path, sets)


def test_a_key_within_a_list_changes_it_alone_whatever_else_is_changed() -> None:
    changes = add_changes("quickstart", {"seed": 7}, {"rewards.0.weight": 3.0, "train.learning_rate": 0.5})
    plain, changed = resolve("quickstart", {}), resolve("quickstart", changes)
    assert (changed.seed, changed.train.learning_rate) == (7, 0.5)
    assert [reward.weight for reward in changed.rewards] == [3.0, *(reward.weight for reward in plain.rewards[1:])]
    assert {key for section in changes.values() if isinstance(section, dict) for key in section} == {"learning_rate"}


def test_a_key_at_the_top_of_the_form_means_the_same_as_in_its_section() -> None:
    at_the_top = {"name": "x", "train.learning_rate": 0.5, "model.name_or_path": None, "train": {"max_steps": 3}}
    assert not validate({"preset": "quickstart", "changes": at_the_top}, SCHEMA)
    in_sections = {"name": "x", "train": {"learning_rate": 0.5, "max_steps": 3}}
    assert resolve("quickstart", at_the_top) == resolve("quickstart", in_sections)
    assert add_changes("quickstart", at_the_top, {"seed": 7}) == {**in_sections, "seed": 7}
    twice = {"train.learning_rate": 0.5, "train": {"learning_rate": 0.1}}
    with pytest.raises(ConfigError, match=r"train.learning_rate = 0.5 at the top and 0.1 under train: fill in one"):
        resolve("quickstart", twice)


def test_the_date_in_a_name_is_that_on_which_the_flow_run_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"name": "nightly-{date}", "registry.model_name": "nightly"}
    assert not validate({"preset": "quickstart", "changes": changes}, SCHEMA)
    assert validate({"preset": "quickstart", "changes": {"name": "nightly-{day}"}}, SCHEMA)
    today = {f"nightly-{datetime.now(UTC).date()}"}
    names = {resolve("quickstart", changes).name, load_config(QUICKSTART, ["name=nightly-{date}"]).name}
    assert names <= today | {f"nightly-{datetime.now(UTC).date()}"}, "outside of a flow run"
    due = datetime.fromisoformat("2026-01-03T01:30:00+02:00")
    monkeypatch.setitem(flow_run.FIELDS, "scheduled_start_time", lambda: due)
    assert resolve("quickstart", changes).name == read_name("quickstart", changes) == "nightly-2026-01-02"
    assert add_changes("quickstart", changes, {"seed": 1})["name"] == "nightly-{date}"


def test_a_list_is_replaced_and_null_is_as_in_the_preset() -> None:
    rewards = [{"function": "length", "args": {"target": 3}}]
    config = resolve("quickstart", {"rewards": rewards, "train": {"max_steps": None}, "seed": None})
    assert [reward.name for reward in config.rewards] == ["length"]
    assert (config.train.max_steps, config.seed) == (80, 0)
    path = configs() / "quickstart.toml"
    assert changes_from_overrides(path, ["rewards.0.weight=2"]) == {
        "rewards": [{"function": "numeric_match", "weight": 2}]
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train": {"learning_rat": 1}}, r"train.learning_rat: unknown key; did you mean 'learning_rate'\?"),
        ({"train": {"learning_rate": -1}}, r"train.learning_rate = -1: Input should be greater than 0"),
        ({"rollout": {"engine": "sglang"}}, r"rollout.engine = 'sglang': Input should be 'auto'"),
        ({"train": 3}, r"train = 3: "),
        ({"train": 3, "train.max_steps": 3}, r"train = 3: "),
        ({"rewards": [{"function": "length", "wait": 1}]}, r"rewards.0.wait: unknown key"),
        ({"train": {"eval_steps": 2, "lr_scheduler_type": "constant"}}, r"train: lr_scheduler_type='constant' ignores"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_key(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve("quickstart", changes)
    in_a_field = "ignores" not in said
    assert bool(validate({"preset": "quickstart", "changes": changes}, SCHEMA)) == in_a_field


@pytest.mark.parametrize("name", ['x", "channel": "#ops', "a\nb", "a" * 201, "../a", 3])
def test_a_name_that_no_run_may_have_does_not_become_the_flow_run_s(name: Any) -> None:
    assert read_name("quickstart", {"name": name}) == "refused"
    assert read_name("quickstart", {"name": "a.b-1"}) == "a.b-1"


def test_a_preset_is_a_file_in_configs_or_any_other(tmp_path: Path) -> None:
    assert SCHEMA["properties"]["preset"]["enum"] == presets() == sorted(p.stem for p in configs().glob("*.toml"))
    with pytest.raises(ConfigError, match=r"preset = 'quikstart': .* did you mean 'quickstart'\?"):
        resolve("quikstart", {})
    for preset in presets():
        assert resolve(preset, {}) == parse_config(load_config(configs() / f"{preset}.toml").model_dump())


def _offered(python: Path, folder: Path, **environment: str) -> dict[str, Any]:
    """The form's field `preset`, in a process that starts in this folder, as `grpo serve` does."""
    code = "import json; from prefect.utilities.callables import parameter_schema as schema\n"
    code += "from flows.pipeline import describe, pipeline\n"
    code += "print(json.dumps([schema(pipeline).model_dump_for_openapi()['properties']['preset'], describe()]))"
    kept = {key: value for key, value in os.environ.items() if key != "GRPO_CONFIGS"}
    done = subprocess.run(
        [python, "-c", code],
        cwd=folder,
        env={**kept, "PYTHONPATH": python_path(ROOT), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    field, page = json.loads(done.stdout.splitlines()[-1])
    return {**field, "page": page}


def test_the_presets_are_those_of_the_project_and_not_of_the_package(tmp_path: Path) -> None:
    project = write_project("mine", "smallest", tmp_path)
    (tmp_path / "bin").mkdir()
    with quick_python(tmp_path / "bin", ["mlflow", "pandera.polars", "prefect.utilities.callables"]) as python:
        field = _offered(python, project)
        assert (field["enum"], field["default"]) == (["smallest"], "smallest")
        assert str(project / "configs") in field["page"]
        assert (project / "configs" / "smallest.toml").read_text() in field["page"], "its values are on the page"
        (project / "configs" / "other.toml").write_text("")
        several = _offered(python, tmp_path, GRPO_CONFIGS=str(project / "configs"))
        assert (several["enum"], several["default"]) == (["other", "smallest"], ""), "nothing starts unchosen"
        nowhere = _offered(python, tmp_path)
        assert "enum" not in nowhere and str(tmp_path / "configs") in nowhere["page"]
