"""The pipeline's parameters: a preset (a file in configs/) and the keys that differ from it.

The form in Prefect's UI is generated from the configuration's models. Prefect's API checks parameters against the form
before a run exists; `resolve` checks the whole configuration against every rule when the run starts.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from datetime import UTC, date
from pathlib import Path
from typing import Annotated, Any

from pydantic import WithJsonSchema

from grpo_core.config.files import dated, describe_bounds, parse_config, read_values, with_keys
from grpo_core.config.run import DATED_NAME, RunConfig, is_run_name
from grpo_core.errors import ConfigError

FIRST = (  # what most runs change, at the top of the form too, which has 200 fields
    "train.max_steps",
    "train.learning_rate",
    "train.per_device_train_batch_size",
    "rollout.num_generations",
    "rollout.max_completion_length",
    "rollout.temperature",
    "algorithm.beta",
    "model.name_or_path",
    "data.train",
    "registry.model_name",
)
LAST = ("seed", "algorithm", "health")  # long or seldom changed: at the end of the form, which cannot be folded


def configs() -> Path:
    """Folder of the presets: $GRPO_CONFIGS, or configs/ in the working folder."""
    return Path(os.environ.get("GRPO_CONFIGS") or "configs").resolve()


def presets() -> list[str]:
    """Names of the TOML files that are in `configs()` now."""
    return sorted(path.stem for path in configs().glob("*.toml"))


def default_preset() -> str:
    """The quickstart, or the only preset there is; otherwise "", which is refused: one has to be chosen."""
    names = presets()
    return "quickstart" if "quickstart" in names else names[0] if len(names) == 1 else ""


def describe_presets() -> str:
    """What each preset sets, as Markdown."""
    texts = [f"`{name}`\n\n```toml\n{_text(configs() / f'{name}.toml')}\n```" for name in presets()]
    return "\n\n".join([f"**Presets**, the files in `{configs()}`: {len(texts)}", *texts])


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError as error:
        return f"# cannot be read: {error.strerror}"


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
    return dated(merge(_read_preset(preset), in_sections(changes)), _due_day())


def _due_day() -> date:
    """Day (UTC) on which this flow run was due, so that a later attempt goes on with the same run; today outside of
    one."""
    from prefect.runtime import flow_run

    return flow_run.scheduled_start_time.astimezone(UTC).date()


def _read_preset(preset: str) -> dict[str, Any]:
    names = presets()
    path = configs() / f"{preset}.toml" if preset in names else Path(preset)
    if not path.is_file():
        near = difflib.get_close_matches(preset, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"presets: {', '.join(names) or 'none'}"
        raise ConfigError(f"preset = {preset!r}: neither a preset in {configs()} nor a file; {hint}")
    return read_values(path)


def in_sections(changes: dict[str, Any]) -> dict[str, Any]:
    """Put keys such as train.learning_rate, which the form has at its top, into their sections. Raises ConfigError if
    such a key is there with another value."""
    keys = {key: value for key, value in changes.items() if "." in key and value is not None}
    sections = {key: value for key, value in changes.items() if "." not in key}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        inner = sections.get(section)
        given = inner.get(name) if isinstance(inner, dict) else None
        if given not in (None, value):
            raise ConfigError(f"{key} = {value!r} at the top and {given!r} under {section}: fill in one of the two")
    return merge(with_keys({}, keys), sections)


def add_changes(preset: str, changes: dict[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Add keys such as train.learning_rate or data.sources.0.weight to the changes to a preset."""
    before = _read_preset(preset)
    return _difference(before, with_keys(merge(before, in_sections(changes)), keys))


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
        fields = form["properties"]
        fields["name"]["pattern"] = f"^{DATED_NAME}$"
        fields["name"]["description"] += " Prefect's run gets this name too, whatever its Run Name says."
        for place, name in enumerate(fields):
            fields[name]["position"] = place + len(fields) * (name in LAST) + len(FIRST) * (name != "name")
        for place, key in enumerate(FIRST, 1):
            section, name = key.split(".")
            fields[key] = {**fields[section]["properties"][name], "title": key, "position": place}
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


class _Offered:
    """Gives a parameter's JSON schema the presets that there are when the schema is made."""

    def __get_pydantic_json_schema__(self, *_: Any) -> dict[str, Any]:
        names = presets()
        return {"type": "string", **({"enum": names} if names else {})}


Preset = Annotated[str, _Offered()]
Changes = Annotated[dict[str, Any], WithJsonSchema(form_schema())]
