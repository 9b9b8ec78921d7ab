"""Makes a model version: logs a trained model's folder as an MLflow model, without a second copy of its weights."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import LoggedModelOutput
from mlflow.exceptions import MlflowException
from mlflow.models import Model
from mlflow.utils.file_utils import local_file_uri_to_path
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_VERSIONS
from packaging.version import Version

from grpo_core import run_files
from grpo_core.config.run import RunConfig
from grpo_core.system.libraries import quiet_libraries
from tasks.processes.training_machine import training_packages
from tasks.registry.answering import Answering, add_answering, answering_of
from tasks.stages.errors import StageError
from tasks.stages.files import WEIGHTS, link, remove

LOGGED_MODEL = "model"  # name of the logged model that holds a version's weights
PINNED = ("torch", "transformers", "tokenizers", "safetensors", "accelerate")


@dataclass(frozen=True)
class Example:
    """A prompt, text or messages, and the model's completion."""

    prompt: Any
    completion: str


def log_version(
    run_id: str,
    training: Path,
    scratch: Path,
    name: str,
    answering: Answering,
    example: Example,
    tags: Mapping[str, Any],
    description: str,
    ask: Callable[[Path], Mapping[str, Any]] = lambda folder: {},
) -> tuple[str, str]:
    """Make a version of registered model `name` from training/model, with its adapter beside it; returns the version's
    number and the id of its logged model. `ask`: gives further tags, from the version's folder before it is registered.

    If the artifact store is a folder of this file system, the weights there are hard links to the training's, and
    read-only: one file under two names. `scratch`: a folder that does not exist yet, beside the training's.
    """
    client = mlflow.MlflowClient()
    run = client.get_run(run_id)
    model = client.create_logged_model(run.info.experiment_id, LOGGED_MODEL, run_id, params=run.data.params)
    try:
        _write(training, scratch, Model(model.artifact_location, run_id, model_id=model.model_id), answering, example)
        tags = {**tags, **ask(scratch)}
        if model.artifact_location.startswith(("file:", "/")):
            shutil.copytree(scratch, local_file_uri_to_path(model.artifact_location), copy_function=link)
        else:
            client.log_model_artifacts(model.model_id, str(scratch))
    except BaseException:
        client.finalize_logged_model(model.model_id, "FAILED")
        raise
    finally:
        remove(scratch)
    client.finalize_logged_model(model.model_id, "READY")
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    tags = {key: str(value) for key, value in tags.items()}
    source = f"models:/{model.model_id}"
    made = client.create_model_version(name, source, run_id, tags, description=description, model_id=model.model_id)
    linked = {MLFLOW_MODEL_VERSIONS: json.dumps([{"name": name, "version": str(made.version)}])}
    client.set_logged_model_tags(model.model_id, linked)  # else its page would say that it is not registered
    return str(made.version), model.model_id


def rehearse_version(run: RunConfig, scratch: Path) -> None:
    """Try what makes a version, on the base model's configuration and tokenizer. Raises StageError if it fails.

    `scratch`: a folder that does not exist yet. It fails where MLflow does not know what a newer transformers does, or
    cannot read the tokenizer.
    """
    import transformers  # seconds, as the two that follow: the stage validate needs them anyway

    from grpo_core.data.prompts import load_tokenizer
    from grpo_core.model.pretrained import from_pretrained

    model, saved = run.model, scratch / run_files.MODEL
    try:
        config = from_pretrained(transformers.AutoConfig, model.name_or_path, model.revision).get_text_config()
        config.architectures = ["CausalLM"]  # the trained model's, which a part of a config may lack
        config.save_pretrained(saved)
        load_tokenizer(model).save_pretrained(saved)
        answering = answering_of(run, conversational=False, tools=None)
        _write(scratch, scratch / "version", Model(str(scratch)), answering, Example("1", "1"))
    except OSError:  # the disk, or the hub's network: it says so itself
        raise
    except Exception as error:
        raise StageError(
            f"with {model.name_or_path} as base model, the stage register would fail: mlflow {mlflow.__version__} and "
            f"transformers {transformers.__version__} raise {type(error).__name__}: {error}. Install releases of "
            "both that work together, such as those in requirements/, or take another base model"
        ) from error
    finally:
        remove(scratch)


def _write(training: Path, folder: Path, card: Model, answering: Answering, example: Example) -> None:
    """Write training/model to `folder` in the form of MLflow's transformers flavour, with the code that answers as in
    the evaluation; the weights are links."""
    bare = folder.with_name(folder.name + ".bare")  # has no weights, which MLflow would copy
    remove(bare)
    remove(folder)
    shutil.copytree(training / run_files.MODEL, bare, ignore=shutil.ignore_patterns("*" + WEIGHTS))
    # MLflow warns that a local folder has no model card and no licence on the hub.
    logging.getLogger("mlflow.transformers").setLevel(logging.ERROR)
    quiet_libraries()  # a deployment's run has its own process
    try:
        mlflow.transformers.save_model(
            str(bare),
            folder,
            task="text-generation",
            mlflow_model=card,
            input_example=example.prompt if isinstance(example.prompt, str) else {"messages": example.prompt},
            metadata={"example_completion": example.completion},
            pip_requirements=[f"{name}=={Version(found).public}" for name, found in training_packages(PINNED).items()],
        )
    finally:
        remove(bare)
    card.flavors["transformers"]["source_model_name"] = answering.base  # not a folder that is gone
    add_answering(card, folder, answering)
    for weights in (training / run_files.MODEL).rglob("*" + WEIGHTS):
        link(weights, folder / "model" / weights.relative_to(training / run_files.MODEL))
    if (training / run_files.ADAPTER).exists():
        shutil.copytree(training / run_files.ADAPTER, folder / "adapter", copy_function=link)
    card.model_size_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    card.save(str(folder / "MLmodel"))
