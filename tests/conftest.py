"""Small real inputs: a character tokenizer, a random Qwen2 model, additions, a run directory ready to train."""

from __future__ import annotations

import atexit
import contextlib
import copy
import faulthandler
import functools
import gc
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from tests.needs import needs
from tests.quick_python import quick_python

# Before any library is imported: tests reach no network and report nothing.
os.environ.update(
    HF_HUB_OFFLINE="1",
    DO_NOT_TRACK="1",
    MLFLOW_DISABLE_TELEMETRY="true",
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    VLLM_NO_USAGE_STATS="1",
    TOKENIZERS_PARALLELISM="false",
    PYTHONSAFEPATH="1",  # as every command sets it
    GRPO_MEASURE="0",  # a measurement of this machine takes seconds
    MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR="false",
    # One thread per process: deterministic, and processes share two cores without spinning on each other. Read when
    # numpy is imported, as jaxtyping's plugin of pytest would do before this file (so pyproject.toml blocks it).
    OMP_NUM_THREADS="1",
)

# Calls of these modules are held to the shapes and dtypes of their annotations, in tests alone: benchmarks import this
# file too. Installed here, since it must precede the first import of the modules.
SHAPED = (
    "grpo_core.algorithm.losses",
    "grpo_core.algorithm.advantages",
    "grpo_core.model.logprobs",
    "grpo_core.model.policy",
    "grpo_core.model.sequences",
    "grpo_core.training.batch",
)
if "PYTEST_VERSION" in os.environ:
    from jaxtyping import install_import_hook

    from tests import checking

    install_import_hook(SHAPED, f"{checking.__name__}.check_types")
    gc.disable()  # until all is imported: a third of that time would go into searching the imports for garbage

if find_spec("vllm") is None:
    pytest_plugins = ["tests.bare_machine"]


def pytest_collection_finish() -> None:
    if (torch := sys.modules.get("torch")) and torch.version.cuda:
        # Where there is no GPU, a test with fake tensors lets autograd see one. It looks once, and would make a thread
        # for it: then no forked process could compute gradients.
        torch.ones(1, requires_grad=True).sum().backward()
    gc.freeze()  # what is imported stays: no later search has to pass through it
    gc.enable()
    atexit.register(gc.unfreeze)  # nanobind's modules complain if their objects are still there at the very end


# A busy machine must not fail a property. Each run draws other examples.
settings.register_profile("ours", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("few", settings.get_profile("ours"), max_examples=5)  # of `make fast`
settings.load_profile("ours")

# Files whose tests share what takes long to start: an import of vLLM that they fork from, the servers of `grpo up`.
SHARING = {
    "vllm": ("rollout/test_vllm.py", "rollout/test_vllm_weights.py", "training/test_weight_sync.py"),
    "servers": ("tests/served/",),
}


# What tests import, of other projects: workers of `pytest -n` are forked from a process that has it. Of ours there is
# nothing, since its shapes are checked; nor pytest's plugins, which it rewrites.
IMPORTED = (
    *("transformers.models.qwen2.modeling_qwen2", "peft", "pandera.polars", "scipy.stats", "datasets"),
    *("mlflow.transformers", "mlflow.store.tracking.sqlalchemy_store", "prefect.deployments", "fastapi"),
    *("matplotlib.pyplot", "playwright.sync_api"),
)


def pytest_configure(config: pytest.Config) -> None:
    folder = tempfile.gettempdir()
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise pytest.UsageError(f"{folder} is mounted noexec, and tests write programs there: set TMPDIR=/var/tmp, say")
    if config.getoption("tx", None):  # in the process that starts the workers
        stack = contextlib.ExitStack()
        config.add_cleanup(stack.close)
        place = stack.enter_context(tempfile.TemporaryDirectory())
        program = stack.enter_context(quick_python(Path(place), IMPORTED, again=False))
        config.option.tx = [f"{each}//python={program}" for each in config.option.tx]


may_serve = True  # also outside of pytest, where benchmarks use what is here


def pytest_runtest_setup(item: pytest.Item) -> None:
    global may_serve
    may_serve = bool({"served", "e2e"} & {mark.name for mark in item.iter_markers()})
    for mark in item.iter_markers("needs"):
        needs(*mark.args)
    if item.get_closest_marker("e2e"):  # which may take long
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Threads of GNU OpenMP do not exist in a forked process, which would wait for them forever."""
    torch = sys.modules.get("torch")
    if torch is not None and (threads := torch.get_num_threads()) > 1:
        torch.set_num_threads(1)
        raise AssertionError(f"torch computes with {threads} threads after this test: undo what it has set")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    (folder,) = SHARING["servers"]
    items.sort(key=lambda item: folder not in item.nodeid)  # one worker runs them all: begin with them
    for item in items:
        if folder in item.nodeid:
            item.add_marker("served")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Where the time of `make e2e` goes, file by file."""
    if config.option.markexpr != "e2e":
        return
    seconds = Counter[str]()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section("seconds by file")
    for file, total in seconds.most_common():
        terminalreporter.write_line(f"{total:7.0f}  {file}")


# Typer would build all commands again for every one that a test runs.
typer.main.get_command = typer.testing._get_command = functools.cache(typer.main.get_command)


class OneWorkerPerFile(LoadFileScheduling):
    """Each file's tests run in one of pytest's workers, and those of files that share a start in the same one."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return next((name for name, files in SHARING.items() if any(each in file for each in files)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneWorkerPerFile:
    return OneWorkerPerFile(config, log)


def make_tokenizer() -> Any:
    """The quickstart's: one token a character of "0123456789+="."""
    from examples.arithmetic import teach

    return teach.make_tokenizer()


def make_sums(project: Path) -> Path:
    """The quickstart's inputs, where its configuration expects them in a project's folder."""
    from examples.arithmetic.make import make

    folder = project / "storage" / "examples" / "arithmetic"
    folder.mkdir(parents=True)
    make(folder)
    return folder


def make_model(folder: Path, architecture: str = "Qwen2", **changes: Any) -> Path:
    """A random model of about 50,000 parameters (or as `changes` of its config say) and its tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    values = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = getattr(transformers, f"{architecture}Config")(**{**values, **changes})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def forgotten_gpus() -> None:
    """Each test asks nvidia-smi again, as a process of its own would."""
    from grpo_core.planning.nvidia import list_devices

    list_devices.cache_clear()


@pytest.fixture(autouse=True)
def nothing_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test finds the modules that its own configuration names, as a process of its own would."""
    from grpo_core.system.beside import BESIDE, FINDER

    FINDER.forget()
    monkeypatch.setenv(BESIDE, "")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def embed_mlflow(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], None]:
    """Puts MLflow's database, without entries, into a storage root: a copy, since MLflow itself would run all of its
    migrations, which take most of a second."""
    from mlflow.store.db.utils import _initialize_tables, create_sqlalchemy_engine

    database = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    engine = create_sqlalchemy_engine(f"sqlite:///{database}")
    _initialize_tables(engine)
    engine.dispose()

    def embed(storage: Path) -> None:
        (storage / "mlflow").mkdir(parents=True)
        shutil.copy(database, storage / "mlflow")

    return embed


def write_sums(path: Path, first: int, last: int) -> Path:
    """Additions `n+(n mod 7)=` for n in [first, last), as Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [(f"{n}+{n % 7}=", str(n + n % 7)) for n in range(first, last)]
    pq.write_table(pa.table({"prompt": [r[0] for r in rows], "answer": [r[1] for r in rows]}), path)
    return path


def with_keys(values: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """The configuration with each key put into the section that declares it; one that chooses its model on data.eval is
    judged on another set."""
    from grpo_core.config.algorithm import AlgorithmConfig
    from grpo_core.config.base import Section
    from grpo_core.config.inputs import ModelConfig
    from grpo_core.config.rollout import RolloutConfig
    from grpo_core.config.training import HealthConfig, TrainConfig

    sections: dict[str, type[Section]] = {
        "model": ModelConfig,
        "rollout": RolloutConfig,
        "algorithm": AlgorithmConfig,
        "train": TrainConfig,
        "health": HealthConfig,
    }
    values = copy.deepcopy(values)
    if {"load_best_model_at_end", "early_stopping_patience"} & keys.keys():
        values.setdefault("evaluation", {}).setdefault("sets", [{"name": "final", "data": "final.parquet"}])
        values.setdefault("promotion", {}).setdefault("set", values["evaluation"]["sets"][0]["name"])
    for key, value in keys.items():
        (section,) = (name for name, model in sections.items() if key in model.model_fields)
        values.setdefault(section, {})[key] = value
    return values


def write_data(folder: Path) -> None:
    """train.parquet and eval.parquet about sums."""
    write_sums(folder / "train.parquet", 10, 34)
    write_sums(folder / "eval.parquet", 60, 76)


def write_inputs(folder: Path, held_out: int = 32) -> Path:
    """A model folder `base`, and sums to train and to evaluate on."""
    make_model(folder / "base")
    write_sums(folder / "train.parquet", 10, 50)
    write_sums(folder / "eval.parquet", 60, 60 + held_out)
    return folder


def small_quickstart(name: str, inputs: Path, train: Any = (), **sections: Any) -> dict[str, Any]:
    """The quickstart in small, as the form sends it, on what `write_inputs` has written."""
    return {
        "name": name,
        "model": {"name_or_path": str(inputs / "base")},
        "data": {"train": str(inputs / "train.parquet"), "eval": str(inputs / "eval.parquet")},
        "rollout": {"engine": "transformers"},
        "train": {"per_device_train_batch_size": 32, **dict(train)},
        **sections,
    }


def write_config(folder: Path, model: Path | None = None, changes: Any = (), **keys: Any) -> Path:
    """A configuration file about sums with its data and, unless one is given, a model folder without a model, all in
    this folder; `changes`: whole sections."""
    import tomli_w

    write_data(folder)
    if model is None:
        (model := folder / "model").mkdir(exist_ok=True)
    file = folder / "config.toml"
    file.write_text(tomli_w.dumps({**config_values(model, folder, **keys), **dict(changes)}))
    return file


def config_values(model: Path, data: Path, **keys: Any) -> dict[str, Any]:
    """A configuration that trains for a few updates in seconds."""
    values = {
        "name": "test",
        "model": {"name_or_path": str(model)},
        "data": {"train": str(data / "train.parquet"), "eval": str(data / "eval.parquet")},
        "rewards": [
            {"function": "numeric_match"},
            {"function": "length", "weight": 0.5, "args": {"target": 3}},
        ],
        "rollout": {"engine": "transformers", "num_generations": 4, "max_completion_length": 6},
        "train": {
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "max_steps": 4,
            "learning_rate": 1e-2,
        },
    }
    return with_keys(values, **keys)


def check_may_serve() -> None:
    """To be called before vLLM or a server starts: tests in which one does are marked, and `make unit` has none."""
    assert may_serve, "a test that starts vLLM or a server needs the mark `served`"


def need_vllm() -> None:
    """Raise what tests.bare_machine makes a skip of if vLLM, which is not imported here, cannot be started."""
    check_may_serve()
    if find_spec("vllm") is None:
        raise ModuleNotFoundError(name="vllm")


def make_run(folder: Path, values: dict[str, Any], num_prompts: int = 24) -> Path:
    """A run directory as the validate and plan stages leave it."""
    from grpo_core.config.files import dump_config, parse_config
    from grpo_core.planning.plan import make_plan, plan_inputs

    config = parse_config(values)
    if config.rollout.engine == "vllm":
        need_vllm()
    (folder / "dataset").mkdir(parents=True)
    write_sums(folder / "dataset" / "train.parquet", 10, 10 + num_prompts)
    write_sums(folder / "dataset" / "eval.parquet", 60, 76)
    (folder / "config.toml").write_text(dump_config(config))
    plan = make_plan(plan_inputs(config, num_prompts))
    (folder / "plan.json").write_text(json.dumps({"plan": asdict(plan)}))
    return folder
