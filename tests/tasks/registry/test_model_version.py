"""A model version is the trained model: it loads, it answers as the training's folder does, and takes no disk twice."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import mlflow
import pandas as pd
import pytest
import yaml
from mlflow.pyfunc.scoring_server import invocations

from flows.serving.model_server import load_version, remove_copy
from grpo_core.config.files import parse_config
from grpo_core.config.inputs import ModelConfig
from grpo_core.errors import GrpoError
from grpo_core.model.loading import load_model, with_adapter
from grpo_core.model.saving import save_model
from grpo_core.system.libraries import NOISY
from tasks.registry.answering import answering_of
from tasks.registry.model_version import Example, log_version, rehearse_version
from tasks.stages.errors import StageError
from tests.conftest import config_values, make_tokenizer
from tests.serving import START_SECONDS, free_ports, vllm_serve

PROMPT = "12+3="


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A run directory with what a LoRA training leaves; its adapter does something."""
    import torch

    folder = tmp_path_factory.mktemp("storage") / "runs" / "small"
    config = ModelConfig(name_or_path=str(model_folder), use_peft=True, lora_r=4)
    model = with_adapter(load_model(model_folder), config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    (folder / "training").mkdir(parents=True)
    save_model(model, make_tokenizer(), folder / "training" / "model", config)
    return folder


@pytest.fixture(scope="module")
def answer(run: Path) -> str:
    """The training's model, greedy, by plain transformers."""
    return complete(run / "training" / "model")


def complete(folder: Path, tokens: int = 4) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    ids = model.generate(prompt, max_new_tokens=tokens, do_sample=False)[0, prompt.shape[1] :]
    return tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def version(run: Path, answer: str, embed_mlflow: Callable[[Path], None]) -> Iterator[Any]:
    storage = run.parents[1]
    embed_mlflow(storage)
    mlflow.set_tracking_uri(f"sqlite:///{storage / 'mlflow' / 'mlflow.db'}")
    client = mlflow.MlflowClient()
    experiment = client.create_experiment("grpo", (storage / "mlflow" / "artifacts").as_uri())
    run_id = client.create_run(experiment).info.run_id
    client.log_param(run_id, "train.max_steps", 4)
    tags = {"run": "small", "plan.max_steps": 4}
    config = parse_config(config_values(Path("base"), storage, max_completion_length=4))
    given = answering_of(config, conversational=False, tools=None), Example(PROMPT, answer)
    number, _ = log_version(run_id, run / "training", run / "model.partial", "sums", *given, tags, "Better.")
    yield client.get_model_version("sums", number)
    mlflow.set_tracking_uri(None)


@pytest.mark.slow
def test_what_would_fail_at_the_end_is_refused_before_the_training(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with transformers 5.23 and MLflow 3.18, of which one names the class that the other asks for its name."""
    from transformers import pipelines

    config, scratch = parse_config(config_values(model_folder, tmp_path)), tmp_path / "scratch"
    rehearse_version(config, scratch)
    monkeypatch.setattr(pipelines, "check_task", lambda task: (task, {"impl": "transformers.TextGeneration"}, None))
    with pytest.raises(StageError, match=r"mlflow 3\.\S+ and transformers 5\.\S+ raise AttributeError"):
        rehearse_version(config, scratch)
    assert not scratch.exists()

    def full(task: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pipelines, "check_task", full)
    with pytest.raises(OSError, match="No space left"):  # no fault of the releases
        rehearse_version(config, scratch)


@pytest.mark.slow
def test_what_makes_a_version_is_not_warned_of_kernels_that_it_does_not_use(version: Any) -> None:
    assert not [name for name in NOISY if logging.getLogger(name).isEnabledFor(logging.WARNING)]


def test_the_pipeline_that_mlflow_loads_answers_as_plain_transformers(version: Any, answer: str) -> None:
    pipeline = mlflow.transformers.load_model("models:/sums/1")
    [served] = pipeline(PROMPT, max_new_tokens=4, do_sample=False, return_full_text=False)
    assert served["generated_text"] == answer
    folder = Path(mlflow.artifacts.download_artifacts("models:/sums/1"))
    assert complete(folder / "model") == answer


def test_the_adapter_beside_the_model_is_what_was_merged_into_its_base(
    version: Any, model_folder: Path, run: Path
) -> None:
    import torch
    from peft import PeftModel

    folder = Path(mlflow.artifacts.download_artifacts("models:/sums/1"))
    adapted = PeftModel.from_pretrained(load_model(model_folder), folder / "adapter").merge_and_unload()
    merged, base = load_model(folder / "model").state_dict(), load_model(model_folder).state_dict()
    for name, weight in adapted.state_dict().items():
        torch.testing.assert_close(merged[name], weight)
    assert any(not torch.equal(merged[name], base[name]) for name in base)


def test_the_weights_are_on_disk_once_and_cannot_be_written_into(version: Any, run: Path) -> None:
    kept = Path(mlflow.artifacts.download_artifacts("models:/sums/1"))
    for name in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        ours, theirs = run / "training" / name, kept / name
        assert ours.stat().st_ino == theirs.stat().st_ino
        assert ours.stat().st_mode & 0o222 == 0
    for file in kept.rglob("*"):
        assert file.suffix == ".safetensors" or file.is_dir() or file.stat().st_nlink == 1, file
    assert {path.name for path in run.iterdir()} == {"training"}


def test_the_version_says_what_it_needs_takes_and_where_it_comes_from(version: Any, answer: str) -> None:
    folder = Path(mlflow.artifacts.download_artifacts("models:/sums/1"))
    card = mlflow.models.get_model_info("models:/sums/1")
    assert json.loads((folder / "input_example.json").read_text()) == PROMPT
    assert card.metadata == {"example_completion": answer}
    assert [field.type.name for field in (*card.signature.inputs, *card.signature.outputs)] == ["string", "string"]
    assert card.flavors["transformers"]["source_model_name"] == "base"
    pinned = dict(line.split("==") for line in (folder / "requirements.txt").read_text().split())
    assert set(pinned) >= {"mlflow", "torch", "transformers"}
    assert not any("+" in number for number in pinned.values())
    weights = (folder / "model" / "model.safetensors").stat().st_size
    assert yaml.safe_load((folder / "MLmodel").read_text())["model_size_bytes"] > weights
    assert version.tags == {"run": "small", "plan.max_steps": "4"}
    assert version.description == "Better."
    run = mlflow.MlflowClient().get_run(version.run_id)
    [made] = run.outputs.model_outputs
    logged = mlflow.MlflowClient().get_logged_model(made.model_id)
    assert (logged.status.value, logged.params) == ("READY", {"train.max_steps": "4"})


def test_mlflow_answers_with_the_completion_alone_by_the_sampling_of_the_evaluation(
    version: Any, answer: str, run: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model, short = mlflow.pyfunc.load_model("models:/sums/1"), complete(run / "training" / "model", 2)
    assert not [warning for warning in recwarn if "type hints" in str(warning.message)]
    assert model.predict(PROMPT) == [answer]
    assert model.predict(["1+1=", PROMPT], params={"max_new_tokens": 2})[1] == short != answer
    stop = answer[1]
    assert model.predict(PROMPT, params={"stop": [stop]}) == [answer[: answer.index(stop)]]
    assert len({*model.predict([PROMPT] * 20, params={"temperature": 9.0})}) > 1
    assert model.predict(pd.DataFrame({"prompt": [PROMPT], "id": [7]})) == [answer]
    with pytest.raises(ValueError, match="the first column is 'id': give prompts as a list, or in a first column"):
        model.predict(pd.DataFrame({"id": ["7"], "prompt": [PROMPT]}))
    body = json.dumps({"inputs": [PROMPT], "params": {"max_new_tokens": 2}})
    served = invocations(body, "application/json", model, model.metadata.get_input_schema())
    assert (served.status, json.loads(served.response)) == (200, {"predictions": [short]})


def test_what_is_served_is_the_version_with_its_sampling_wherever_its_files_are(
    version: Any, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = mlflow.MlflowClient()
    found = load_version(client, "sums", "1")
    assert found.sampling == {"max_tokens": 4, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "stop": []}
    assert (found.folder / "model.safetensors").samefile(run / "training" / "model" / "model.safetensors")
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    monkeypatch.setattr(client, "get_model_version_download_uri", lambda *_: "models:/sums/1")  # as from a bucket
    copied = load_version(client, "sums", "1")
    assert copied.folder == tmp_path / "served" / "sums-1" / "model"
    assert copied.sampling == found.sampling and (copied.folder / "model.safetensors").is_file()
    card = copied.folder.parent / "MLmodel"
    card.write_text(card.read_text().replace("template:", "other:"))  # an earlier release had none
    with pytest.raises(GrpoError, match="register --run RUN --force"):
        load_version(client, "sums", "1")
    remove_copy(copied)
    remove_copy(found)  # is no copy
    assert [*(tmp_path / "served").iterdir()] == [] and found.folder.is_dir()


@pytest.mark.e2e
def test_vllm_serves_the_version_and_answers_as_plain_transformers(version: Any, answer: str, tmp_path: Path) -> None:
    folder = Path(mlflow.artifacts.download_artifacts("models:/sums/1")) / "model"
    [port] = free_ports(1)
    with vllm_serve(folder, port, tmp_path / "vllm.log") as url:
        asked = {"model": "sums", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        given = httpx2.post(f"{url}/v1/completions", json=asked, timeout=START_SECONDS).raise_for_status().json()
    assert given["choices"][0]["text"] == answer
