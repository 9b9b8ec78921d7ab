"""The pipeline's parameters: a preset (a file in configs/) and the keys that differ from it.

The form in Prefect's UI is generated from the configuration's models. Prefect's API checks parameters against the form
before a run exists; `resolve` checks the whole configuration against every rule when the run starts.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import WithJsonSchema

from grpo_core.config.files import describe_bounds, parse_config, read_values, with_keys
from grpo_core.config.run import RunConfig, is_run_name
from grpo_core.errors import ConfigError

CONFIGS = Path(os.environ.get("GRPO_CONFIGS", Path(__file__).parents[2] / "configs"))
PRESETS = sorted(path.stem for path in CONFIGS.glob("*.toml"))
LAST = ("seed", "algorithm", "health")  # long or seldom changed: at the end of the form, which cannot be folded


def resolve(preset: str, changes: dict[str, Any]) -> RunConfig:
    """Return the configuration of a preset, or of any TOML file, with the keys in `changes` replaced. A list is
    replaced as a whole; null means "as in the preset". Raises ConfigError, which names every wrong key."""
    return parse_config(_read(preset, changes))


def read_name(preset: str, changes: dict[str, Any]) -> str:
    """Name of the run that these parameters start; "refused" if there is none, or no run may have it."""
    try:
        name = _read(preset, changes).get("name")
    except ConfigError:  # the flow itself reports it
        name = None
    return str(name) if is_run_name(name) else "refused"


def _read(preset: str, changes: dict[str, Any]) -> dict[str, Any]:
    return merge(_read_preset(preset), changes)


def _read_preset(preset: str) -> dict[str, Any]:
    path = CONFIGS / f"{preset}.toml" if preset in PRESETS else Path(preset)
    if not path.is_file():
        near = difflib.get_close_matches(preset, PRESETS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"presets: {', '.join(PRESETS)}"
        raise ConfigError(f"preset = {preset!r}: neither a preset in {CONFIGS} nor a file; {hint}")
    return read_values(path)


def add_changes(preset: str, changes: dict[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Add keys such as train.learning_rate or data.sources.0.weight to the changes to a preset."""
    before = _read_preset(preset)
    return _difference(before, with_keys(merge(before, changes), keys))


def changes_from_overrides(path: Path, overrides: list[str] | None) -> dict[str, Any]:
    """Return the changes that `section.key=value` overrides make to a file, in the form that `resolve` takes."""
    return _difference(read_values(path), read_values(path, overrides))


def form_schema(*sections: str) -> dict[str, Any]:
    """JSON schema of `changes`: every key of a configuration, or of some sections, grouped by section, none required.

    It has no defaults, because Prefect would fill them in and send them, while an empty field has to mean "as in the
    preset". The description names the configuration's own default.
    """
    schema = RunConfig.model_json_schema()
    if sections:
        schema["properties"] = {section: schema["properties"][section] for section in sections}
    form = _section(schema, schema["$defs"])
    del form["required"]
    if not sections:
        form["properties"]["name"]["description"] += " Prefect's run gets this name too, whatever its Run Name says."
        for name in LAST:
            form["properties"][name]["position"] += len(form["properties"])
    return {**form, "title": "changes", "default": {}}


def _section(schema: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    fields = {
        name: {**_field(field, sections), "title": name, "position": position}
        for position, (name, field) in enumerate(schema["properties"].items())
    }
    kept: dict[str, Any] = {
        key: schema[key] for key in ("type", "description", "required", "additionalProperties") if key in schema
    }
    return {**kept, "properties": fields}


def _field(field: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in field:
        section = _section(sections[field["$ref"].rsplit("/", 1)[-1]], sections)
        section.pop("required", None)
        return section
    forms = [form for form in field.get("anyOf", [field]) if form.get("type") != "null"]
    form = forms[0]  # the first of several: Prefect would ask which one is meant, even for an empty field
    rules: dict[str, Any] = {key: value for key, value in form.items() if key not in ("default", "title")}
    if rules.get("type") == "boolean":  # as a switch, the form would send false for a field that was not touched
        rules = {"enum": [True, False]}
    if "$ref" in form.get("items", {}):
        rules["items"] = _section(sections[form["items"]["$ref"].rsplit("/", 1)[-1]], sections)
        field = {**field, "description": f"{field['description']} A value here replaces the whole list."}
    # Prefect's UI shows neither bounds nor patterns by itself.
    meaning = field["description"].replace("\n", " ")
    bounds = f" Bounds: {describe_bounds(form)}." if describe_bounds(form) else ""
    default = f" Default: {json.dumps(field['default'])}." if field.get("default") is not None else ""
    return {**rules, "description": meaning + bounds + default}


def merge(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Replace nested values by those in `changes`; null changes nothing."""
    merged = dict(values)
    for key, change in changes.items():
        if isinstance(change, dict) and isinstance(merged.get(key, {}), dict):
            merged[key] = merge(merged.get(key, {}), change)
        elif change is not None:
            merged[key] = change
    return merged


def _difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _difference(before.get(key, {}), value)
        if isinstance(value, dict) and isinstance(before.get(key, {}), dict)
        else value
        for key, value in after.items()
        if before.get(key) != value
    }


Preset = Annotated[str, WithJsonSchema({"type": "string", "enum": PRESETS})]
Changes = Annotated[dict[str, Any], WithJsonSchema(form_schema())]
