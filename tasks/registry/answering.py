"""What makes a model version answer in MLflow as it was evaluated: settings, signature, and code that reads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow import pyfunc
from mlflow.models import Model, ModelSignature
from mlflow.types.schema import AnyType, Array, ColSpec, ParamSchema, ParamSpec, Schema

from grpo_core.config.run import RunConfig

CODE = Path(__file__).with_name("answering_model.py")
TYPES = {"max_new_tokens": "long", "temperature": "double", "top_p": "double", "top_k": "long"}
LISTS = {"stop": "string"}
# OpenAI's name of each of these.
OPENAI = {"max_new_tokens": "max_tokens", **{name: name for name in ("temperature", "top_p", "top_k", "stop")}}


@dataclass(frozen=True)
class Answering:
    """How a version answers. `base`: the model that was trained; `settings`: what `answering_model` reads, of which
    `template` are variables of the chat template, and the tools' schemas, as JSON; `sampling`: the evaluation's, by
    transformers' names."""

    base: str
    settings: dict[str, Any]
    sampling: dict[str, Any]

    @property
    def conversational(self) -> bool:
        return bool(self.settings["conversational"])


def answering_of(
    config: RunConfig, *, conversational: bool, tools: Sequence[Any] | None, images: bool = False
) -> Answering:
    """How a version of a run answers, by its configuration. `tools`: JSON schemas of those that the model was shown;
    `images`: it was shown some."""
    model, evaluation = config.model, config.evaluation
    system_prompts = {source.system_prompt or "" for source in config.data.sources or [config.data]}
    return Answering(
        base=f"{model.name_or_path}@{model.revision}" if model.revision else model.name_or_path,
        settings={
            "conversational": conversational,
            "system_prompt": system_prompts.pop() if len(system_prompts) == 1 else "",  # else a request says its own
            "template": json.dumps({**config.data.chat_template_kwargs, **({"tools": tools} if tools else {})}),
            "precision": config.train.mixed_precision,
            "images": images,
        },
        sampling={
            "max_new_tokens": config.evaluation_length,
            "temperature": evaluation.temperature,
            "top_p": evaluation.top_p,
            "top_k": evaluation.top_k,
            "stop": [*config.rollout.stop],
        },
    )


def add_answering(card: Model, folder: Path, answering: Answering) -> None:
    """Make MLflow answer by `answering_model`, instead of by a pipeline of transformers that repeats the prompt.

    A text or texts in, or conversations in the column `messages`; one text each out. Sampling is given as parameters,
    which default to the evaluation's.
    """
    shutil.copy(CODE, folder)
    environment, defaults = card.flavors[pyfunc.FLAVOR_NAME][pyfunc.ENV], answering.sampling
    pyfunc.add_to_model(
        card,
        loader_module="mlflow.pyfunc.model",
        conda_env=environment["conda"],
        python_env=environment["virtualenv"],
        model_config=answering.settings,
        model_code_path=CODE.name,
        artifacts={"model": {"path": "model", "uri": "model"}},
    )
    column = ColSpec(Array(AnyType()), "messages") if answering.conversational else ColSpec("string")
    params = [ParamSpec(name, kind, defaults[name]) for name, kind in TYPES.items()]
    params += [ParamSpec(name, kind, defaults[name], shape=(-1,)) for name, kind in LISTS.items()]
    card.signature = ModelSignature(Schema([column]), Schema([ColSpec("string")]), ParamSchema(params))
