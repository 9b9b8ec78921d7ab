"""Attempts to have the worker run code, or send something away, by what the form in Prefect's UI may say."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import pytest

from flows.parameters import allowed
from flows.parameters.allowed import resolve_allowed
from flows.parameters.form import configs, resolve
from grpo_core.config.files import describe_keys
from grpo_core.config.inputs import ModelConfig
from grpo_core.environments.registry import ADAPTERS
from grpo_core.errors import ConfigError
from grpo_core.model.loading import load_model
from grpo_core.rewards.registry import BUILTIN
from tasks.data.lengths import ModelError, load_tokenizer_and_context
from tests.test_strangers import Pickled

OWN = """
from pathlib import Path
from os import system
from functools import partial
Path(__file__).with_name("imported").touch()
def graded(completions, path="x"): return [0.0 for _ in completions]
def _twice(completions, factor): return [factor for _ in completions]
doubled = partial(_twice, factor=2.0)
shell = partial(system)
"""
REACHING = ("classifier", "judge", "unit_tests")  # files, servers, programs


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With a module `house`, and a preset `team` that names a reward of it."""
    (tmp_path / "house.py").write_text(OWN)
    preset = (configs() / "quickstart.toml").read_text()
    reward = '[[rewards]]\nfunction = "house:graded"\nargs = { path = "team" }\n[[rewards]]\nfunction = "numeric_match"'
    (tmp_path / "team.toml").write_text(preset.replace('[[rewards]]\nfunction = "numeric_match"', reward))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(allowed.MODULES, raising=False)
    monkeypatch.setenv("GRPO_CONFIGS", str(tmp_path))
    yield tmp_path
    sys.modules.pop("house", None)


def _rewards(*functions: str, **keys: Any) -> dict[str, Any]:
    return {"rewards": [{"function": function, **keys} for function in functions]}


def test_no_function_of_a_module_that_the_worker_does_not_list_not_even_imported(folder: Path) -> None:
    changes = _rewards("os:system", "house:graded", "builtins:exec", args={"command": f"touch {folder / 'ran'}"})
    with pytest.raises(ConfigError) as error:
        resolve_allowed("team", changes)
    assert [line.partition(":")[0] for line in str(error.value).splitlines()] == [
        f"rewards.{place}.function = '{name}" for place, name in enumerate(("os", "house", "builtins"))
    ]
    assert "modules that the worker's GRPO_REWARD_MODULES lists (none)" in str(error.value)
    assert {path.name for path in folder.iterdir()} == {"house.py", "team.toml"}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("section", "key", "given"),
    [
        ("rollout", "vllm_server_base_urls", ["http://evil.example"]),
        ("launch", "hosts", ["evil.example"]),
        ("launch", "server_hosts", ["evil.example"]),
        ("publish", "hub_repository", "evil/weights"),
        ("teacher", "url", "http://evil.example"),
        ("launch", "slurm", ["--partition=evil"]),
        ("launch", "kubernetes", "evil.yaml"),
        ("launch", "launcher", "slurm"),
    ],
)
def test_no_machine_to_which_weights_or_the_environment_would_be_sent(
    section: str, key: str, given: list[str] | str
) -> None:
    base: dict[str, Any] = {"rollout": {"engine": "vllm-server"}, "publish": {"formats": ["huggingface"]}}
    changes = {**base, section: {**base.get(section, {}), key: given}}
    said = rf"{section}\.{key} = {re.escape(repr(given))}: here only a preset may set where the environment, weights or"
    for each in (changes, {**base, f"{section}.{key}": given}):
        with pytest.raises(ConfigError, match=said):
            resolve_allowed("team", each)


def test_a_listed_module_s_own_rewards_and_nothing_that_it_imports(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(allowed.MODULES, "team.rewards, house")
    names = [reward.name for reward in resolve_allowed("team", _rewards("house:graded", "house:doubled")).rewards]
    assert names == ["graded", "doubled"]
    with pytest.raises(ConfigError, match=r"house:system': it is defined in the module 'posix', which the worker's"):
        resolve_allowed("team", _rewards("house:system"))
    with pytest.raises(ConfigError, match=r"house:shell': it is defined in the module 'posix'"):
        resolve_allowed("team", _rewards("house:shell"))
    framed = resolve_allowed("team", _rewards("verl:house:graded")).rewards  # the module counts, not the framework
    assert [reward.function for reward in framed] == ["verl:house:graded"]
    for framework in ("verl", "swift"):
        with pytest.raises(ConfigError, match=rf"{framework}:house:system': it is defined in the module 'posix'"):
            resolve_allowed("team", _rewards(f"{framework}:house:system"))
        with pytest.raises(ConfigError, match=rf"{framework}:os:system': a deployment's parameters may name built-in"):
            resolve_allowed("team", _rewards(f"{framework}:os:system"))
    with pytest.raises(ConfigError, match=r"house\.sub:graded': a deployment's parameters"):
        resolve_allowed("team", _rewards("house.sub:graded"))


ACTING = """
from os import system
from pathlib import PurePath
class Maze:
    def __init__(self, size=3): ...
def look(way: str) -> str: return way
"""


def test_no_environment_or_tool_of_a_module_that_the_worker_does_not_list(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preset's and built-in ones may be named; of a listed module, what it defines and not what it imports."""
    monkeypatch.delitem(sys.modules, "acting", raising=False)
    (folder / "acting.py").write_text(ACTING)
    with (folder / "team.toml").open("a") as preset:
        preset.write('\n[environment]\nenvironment_factory = "acting:Maze"\nenvironment_args = { size = 5 }\n')

    def refused(**environment: Any) -> str:
        with pytest.raises(ConfigError) as error:
            resolve_allowed("team", {"environment": environment})
        return str(error.value)

    assert resolve_allowed("team", {"environment": {"tools": ["calculator"]}}).environment.args_of("") == {"size": 5}
    assert resolve_allowed("team", _rewards("environment")).rewards[0].name == "environment"
    assert "may name built-in environments and tools, those of its preset" in refused(tools=["acting:look"])
    assert refused(tools=["os:system"]).startswith("environment: 'os:system': a deployment's parameters may")
    assert "environment_args: here only a preset may set them" in refused(environment_args={"size": 9})
    for adapter in ADAPTERS:
        assert f"{adapter!r}: it hands what a policy writes to other" in refused(environment_factory=adapter)
    args = {"url": "http://evil"}
    assert "environment_args: here only" in refused(environment_factory="openenv", environment_args=args)
    monkeypatch.setenv(allowed.MODULES, "acting")
    assert "it is defined in the module 'posix', which the worker's" in refused(tools=["acting:system"])
    defined = PurePath.__module__  # not "pathlib" in each Python
    assert f"in the module {defined!r}, which the worker's" in refused(environment_factory="acting:PurePath")
    assert "'acting:gone' cannot be imported" in refused(tools=["acting:gone"])
    config = resolve_allowed("team", {"environment": {"tools": ["acting:look"], "environment_args": {"size": 9}}})
    assert (config.environment.tools, config.environment.args_of("")) == (["acting:look"], {"size": 9})


def test_other_people_s_environments_only_if_the_preset_names_them(folder: Path) -> None:
    with (folder / "team.toml").open("a") as preset:
        preset.write('\n[environment]\nenvironment_factory = "reasoning-gym"\n')
    assert resolve_allowed("team", {"seed": 1}).environment.environment_factory == "reasoning-gym"
    with pytest.raises(ConfigError, match="'textarena': it hands what a policy writes to other people's code"):
        resolve_allowed("team", {"environment": {"environment_factory": "textarena"}})


def test_a_preset_s_own_reward_as_it_stands_there_and_not_with_other_arguments(folder: Path) -> None:
    config = resolve_allowed("team", _rewards("house:graded", args={"path": "team"}, weight=3.0))
    assert config.rewards[0].weight == 3
    assert [reward.name for reward in resolve_allowed("team", {"seed": 1}).rewards] == ["graded", "numeric_match"]
    with pytest.raises(ConfigError, match=r"rewards\.0\.function = 'house:graded'"):
        resolve_allowed("team", _rewards("house:graded", args={"path": "/etc/passwd"}))


def test_no_file_as_a_preset_nor_a_module_from_its_folder(folder: Path) -> None:
    evil = folder / "elsewhere" / "evil.toml"
    evil.parent.mkdir()
    evil.write_text((folder / "team.toml").read_text().replace("house:graded", "house:doubled"))
    resolve(str(evil), {})  # for the flow run's name
    for preset in (str(evil), "../team", "team.toml", ""):
        with pytest.raises(ConfigError, match="a deployment takes a preset of its worker: team"):
            resolve_allowed(preset, {})
    assert str(evil.parent) not in sys.path


def test_a_module_beside_the_worker_s_presets_only_if_it_is_listed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    presets = folder / "presets"
    presets.mkdir()
    (folder / "team.toml").rename(presets / "team.toml")
    (presets / "beside_presets.py").write_text(OWN)
    monkeypatch.setenv("GRPO_CONFIGS", str(presets))
    with pytest.raises(ConfigError, match="GRPO_REWARD_MODULES lists"):
        resolve_allowed("team", _rewards("beside_presets:graded"))
    assert {path.name for path in presets.iterdir()} == {"beside_presets.py", "team.toml"}
    monkeypatch.setenv(allowed.MODULES, "beside_presets")
    assert resolve_allowed("team", _rewards("beside_presets:graded")).rewards[0].name == "graded"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", sorted({*BUILTIN} - {*REACHING, "environment"}))
def test_a_built_in_reward_that_looks_at_text_only_may_be_named_with_any_arguments(name: str) -> None:
    assert resolve_allowed("team", _rewards(name, args={"target": 1})).rewards[0].name == name


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", REACHING)
def test_a_built_in_reward_that_reaches_further_may_not(name: str) -> None:
    """Such as the judge, who sends a key of the environment to an address, or a sandbox that is turned off."""
    with pytest.raises(ConfigError, match="only have the args that a preset gives it"):
        resolve_allowed("team", _rewards(name, args={"sandbox": "none", "base_url": "http://evil", "model": "/"}))


def test_every_other_built_in_reward_looks_at_text_only() -> None:
    """Look at what a new one reaches before you add it here or set `looks_at_text_only`."""
    assert {name for name, record in BUILTIN.items() if not record.looks_at_text_only} == {*REACHING}


@pytest.mark.usefixtures("folder")
def test_columns_and_schemas_are_of_listed_modules_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"data\.schema = 'os:environ': a deployment's parameters may name"):
        resolve_allowed("team", {"data": {"schema": "os:environ"}})
    changes = {"data": {"columns": {"prompt": "os:getenv", "answer": "Answer: {answer}"}}}
    with pytest.raises(ConfigError, match=r"data\.columns\.prompt = 'os:getenv': a deployment's parameters may name"):
        resolve_allowed("team", changes)
    monkeypatch.setenv("GRPO_REWARD_MODULES", "os")
    assert resolve_allowed("team", changes).data.columns == changes["data"]["columns"]


def test_every_key_that_may_name_a_file_an_address_or_code_is_known() -> None:
    """Those of rewards and environments are dealt with above. Of the others, paths and hub names are read as data."""
    read = {"model.name_or_path", "model.gguf_file", "model.adapter", "data.train", "data.eval", "evaluation.sets.data"}
    read |= {
        "teacher.model",
        "warm_start.demonstrations",
        "rollout.recording",
        "data.sources.train",
        "data.sources.eval",
        "data.sources.teacher",
    }
    splits = ("train_split", "eval_split", "subset", "revision")
    names = {"name", "model.revision", "model.lora_target_modules", "model.lora_modules_to_save", "rollout.stop"}
    names |= {"warm_start.split", "warm_start.revision"}
    names |= {"teacher.template"}  # a text, of which no place is evaluated
    names |= {"teacher.revision", "rollout.vllm_args"}  # of which a list says what may be passed
    names |= {f"data.{key}" for key in (*splits, "system_prompt", "chat_template_kwargs", "curriculum.band")}
    names |= {f"data.sources.{key}" for key in (*splits, "name", "system_prompt", "rewards", "environment")}
    names |= {f"evaluation.{key}" for key in ("accuracy_reward", "answer_pattern", "category_column", "group_column")}
    names |= {f"evaluation.sets.{key}" for key in ("name", "split", "subset", "revision", "source")}
    names |= {"registry.experiment", "registry.model_name", "registry.alias", "registry.sweep"}
    names |= {"publish.formats", "promotion.set", "promotion.guards.set", "promotion.guards.metric"}
    refused = {".".join(address) for address in allowed.ADDRESSES}
    refused |= {f"environment.{key}" for key in ("environment_factory", "environment_args", "tools")}
    refused |= {"data.columns", "data.sources.columns", "data.schema"}
    free_text = {
        key
        for key, _, accepts, _ in describe_keys()
        if any(kind in accepts.split() for kind in ("string", "array", "object")) and not key.startswith("rewards.")
    }
    assert free_text <= read | names | refused


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "ran"


@pytest.fixture
def base(tmp_path: Path, model_folder: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "base"))


def test_a_model_s_own_code_is_not_run(base: Path, marker: Path) -> None:
    (base / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    config = json.loads((base / "config.json").read_text())
    own = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.Model", None]}
    (base / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": own}))
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_tokenizer_and_context(ModelConfig(name_or_path=str(base)))
    with pytest.raises((ValueError, OSError)):
        load_model(base)
    assert not marker.exists()


def test_a_model_s_pickled_weights_run_nothing(base: Path, marker: Path) -> None:
    (base / "model.safetensors").unlink()
    (base / "pytorch_model.bin").write_bytes(pickle.dumps({"lm_head.weight": Pickled(marker)}))
    with pytest.raises(Exception, match=r"(?i)weights|pickle"):
        load_model(base)
    assert not marker.exists()
    pickle.loads((base / "pytorch_model.bin").read_bytes())
    assert marker.exists(), "it would have"
