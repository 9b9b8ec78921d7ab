"""A run's configuration: read from TOML, checked as a whole, written back.

Imports no torch, so that a plan answers immediately.
"""

from __future__ import annotations

import copy
import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, ValidationError

from grpo_core.config.columns import is_function
from grpo_core.config.functions import own_name
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from grpo_core.system import beside

SHOWN = 200  # characters of a wrong value
DATE = "{date}"  # in a run's name


def parse_config(values: dict[str, Any]) -> RunConfig:
    """Validate nested `values`; `{date}` in the name is today (UTC). Raises ConfigError with every mistake, and for
    unknown keys the nearest known one."""
    try:
        return RunConfig.model_validate(dated(values, datetime.now(UTC).date()))
    except ValidationError as error:
        # A default that could not be made is a consequence of another mistake.
        mistakes = [it for it in error.errors() if it["type"] != "default_factory_not_called"]
        raise ConfigError("\n".join(map(_sentence, mistakes))) from None


def dated(values: dict[str, Any], day: date) -> dict[str, Any]:
    """Replace `{date}` in the run's name by a day, such as 2026-11-27."""
    name = values.get("name")
    return {**values, "name": name.replace(DATE, day.isoformat())} if isinstance(name, str) else values


def load_config(path: Path | str, overrides: list[str] | None = None) -> RunConfig:
    """Read a TOML file and apply `section.key=value` overrides (values in TOML syntax, bare strings allowed). Makes the
    modules beside the file that it names importable."""
    config = parse_config(read_values(path, overrides))
    search_beside(Path(path), named_modules(config))
    return config


def read_values(path: Path | str, overrides: list[str] | None = None) -> dict[str, Any]:
    """The values of a TOML file and its overrides, not yet validated."""
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file (looked in {Path.cwd()})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    for override in overrides or []:
        _override(values, override)
    return values


def read_overrides(overrides: list[str] | None) -> dict[str, Any]:
    """The values of `section.key=value` overrides alone, not yet validated."""
    values: dict[str, Any] = {}
    for override in overrides or []:
        _override(values, override)
    return values


def with_keys(values: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested values in which keys such as train.learning_rate or data.sources.0.weight have these values."""
    changed = copy.deepcopy(dict(values))
    for key, value in keys.items():
        _set(changed, key, value)
    return changed


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as TOML; `parse_config` of it gives the same configuration back."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def describe_keys() -> Iterator[tuple[str, str, str, str]]:
    """Every key with its default, what it accepts, and its meaning, in the order of the models."""

    def walk(schema: dict[str, Any], prefix: str) -> Iterator[tuple[str, str, str, str]]:
        for name, field in schema["properties"].items():
            nested = field.get("items", field).get("$ref", "").rsplit("/", 1)[-1]
            if nested:
                yield from walk(root["$defs"][nested], f"{prefix}{name}.")
                continue
            default = "required" if name in schema.get("required", ()) else _toml(field.get("default"))
            forms = field.get("anyOf", [field])
            accepts = " or ".join(_accepts(form) for form in forms if form.get("type") != "null")
            yield f"{prefix}{name}", default, accepts, field.get("description", "").replace("\n", " ")

    root = RunConfig.model_json_schema()
    yield from walk(root, "")


def _accepts(form: dict[str, Any]) -> str:
    if "enum" in form:
        return ", ".join(form["enum"])
    return f"{form['type']} {describe_bounds(form)}".strip()


def describe_bounds(form: dict[str, Any]) -> str:
    """The bounds in a JSON schema, such as "> 0 ≤ 1"; empty without any."""
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return " ".join(f"{sign} {form[key]}" for key, sign in signs.items() if key in form)


def _toml(default: Any) -> str:
    return "" if default is None else json.dumps(default)


def _override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator:
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    _set(values, key.strip(), value)


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    node: Any = values
    try:
        for part in sections:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        node[last] = value
    except (AttributeError, IndexError, TypeError, ValueError):
        raise ConfigError(f"{key} = {value!r}: the configuration has no place called {key!r}") from None


def _sentence(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        section, name = _model_at(error["loc"][:-1]), str(error["loc"][-1])
        near = difflib.get_close_matches(name, section.model_fields, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(section.model_fields)}"
        return f"{key}: unknown key; {hint}"
    if error["type"] == "missing":
        return f"{key}: missing; it has no default"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{key}: {message}" if key else message
    value = repr(error["input"])
    return f"{key} = {value if len(value) <= SHOWN else value[:SHOWN] + '…'}: {message}"


def _model_at(location: tuple[int | str, ...]) -> type[BaseModel]:
    model: Any = RunConfig
    for part in location:
        if isinstance(part, str):
            annotation = model.model_fields[part].annotation
            (model,) = get_args(annotation) or (annotation,)  # of a list, the type of its entries
    return model


KEPT = "rewards"  # folder beside a run's configuration, with copies of the modules that it names


def named_modules(config: RunConfig) -> set[str]:
    """The modules that a configuration names, for rewards, environments, tools, columns and a schema."""
    named = [own_name(reward.function) for reward in config.rewards]
    named += [*config.environment.factories.values(), *config.environment.tools, config.data.schema or ""]
    named += [how for origin in config.data.origins.values() for how in origin.columns.values() if is_function(how)]
    return {name.partition(":")[0] for name in named if ":" in name}


def search_beside(config: Path, modules: Iterable[str]) -> None:
    """Make these modules importable from the working folder, from beside a configuration, and from what a run keeps."""
    folder = config.parent.resolve()
    beside.search(map(str, (Path.cwd(), folder, folder / KEPT)), modules)
