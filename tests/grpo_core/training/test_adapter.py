"""A training that goes on with an adapter: where it starts, what it is compared with, and what it leaves."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from grpo_core.config.evaluation import HELD_OUT
from grpo_core.config.inputs import ModelConfig
from grpo_core.config.training import TrainConfig
from grpo_core.errors import ConfigError
from grpo_core.model.loading import load_model, load_starting_policy, trainable_state, whole_weights, with_adapter
from grpo_core.model.saving import save_adapter
from grpo_core.model.sharded import forward, sharding
from grpo_core.planning.adapter import DESCRIBED, HARMLESS, _not_plain, check_adapter
from grpo_core.training.loop import train
from grpo_core.training.session import load_session
from tests.conftest import config_values, make_model, make_run, make_tokenizer
from tests.grpo_core.training.several import in_two_processes
from tests.grpo_core.training.training import assert_same, metrics_of, trained_run

LAYERS = ["q_proj", "down_proj"]
KEYS: dict[str, Any] = {"use_peft": True, "lora_r": 3, "lora_alpha": 12, "lora_target_modules": LAYERS}
IDS = torch.arange(10)[None]


@pytest.fixture
def adapter(model_folder: Path, tmp_path: Path) -> Path:
    """An adapter that does something, as a run leaves it."""
    model = with_adapter(load_model(model_folder), ModelConfig(name_or_path=str(model_folder), **KEYS))
    torch.manual_seed(5)
    for tensor in trainable_state(model).values():
        nn.init.normal_(tensor, std=0.1)
    save_adapter(model, tmp_path / "adapter")
    return tmp_path / "adapter"


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits


def _continue_from_the_checkpoint(run: Path) -> None:
    """A finished training that goes on from its checkpoint of step 2 ends as it did."""
    whole = shutil.copytree(run, run.parent / "whole")
    (run / "training" / "result.json").unlink()
    assert train(run, run / "training")["resumed_at_step"] == 2
    AcceleratorState._reset_state(reset_partial_state=True)
    assert_same(run, whole)


def _trained(folder: Path, tmp_path: Path, **keys: Any) -> Path:
    run = trained_run(tmp_path / "run", config_values(folder, tmp_path, **keys))
    AcceleratorState._reset_state(reset_partial_state=True)
    return run


def _model(folder: Path, adapter: Path, **keys: Any) -> ModelConfig:
    return ModelConfig(name_or_path=str(folder), adapter=str(adapter), **KEYS | keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_starts_from_what_peft_loads(model_folder: Path, adapter: Path, dtype: torch.dtype) -> None:
    expected = _logits(PeftModel.from_pretrained(load_model(model_folder), adapter))
    assert not torch.allclose(expected, _logits(load_model(model_folder)), atol=0.1)
    config = _model(model_folder, adapter)
    torch.testing.assert_close(_logits(with_adapter(load_model(model_folder), config)), expected)
    start = load_starting_policy(config, dtype=dtype, device="cpu")
    assert {parameter.dtype for parameter in start.parameters()} == {dtype}
    torch.testing.assert_close(_logits(start.float()), expected, atol=1e-4 if dtype == torch.float32 else 0.3, rtol=0.1)


@pytest.mark.served
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_processes_that_share_a_model_hold_the_same_start_together(
    model_folder: Path, adapter: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    config = _model(model_folder, adapter)
    alone = load_starting_policy(config, dtype=dtype, device="cpu")
    weights, logits = dict(alone.state_dict()), _logits(alone)
    precision = "bf16" if dtype == torch.bfloat16 else "no"

    def work(rank: int) -> None:
        shard = sharding(TrainConfig(sharding="full", num_processes=2, mixed_precision=precision), frozen=True)
        start = load_starting_policy(config, dtype=dtype, device="cpu", shard=shard)
        assert all(isinstance(weight, DTensor) for weight in start.parameters())
        whole = dict(whole_weights(start, dtype))
        assert whole.keys() == weights.keys()
        assert all(torch.equal(whole[name], weights[name]) for name in whole)
        with torch.no_grad():
            torch.testing.assert_close(forward(start, input_ids=IDS).logits, logits)

    in_two_processes(tmp_path / "group", work)


@pytest.mark.slow
def test_it_is_compared_with_its_start_leaves_one_adapter_over_the_base_and_is_continued_bit_for_bit(
    model_folder: Path, adapter: Path, tmp_path: Path
) -> None:
    from grpo_core.evaluation.run import evaluate  # needs polars, which a training does not

    run = _trained(model_folder, tmp_path, adapter=str(adapter), beta=0.1, save_steps=2, **KEYS)
    steps = metrics_of(run)
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-7)
    assert steps[-1]["kl"] > 1e-5
    assert all(step["sampling/sync_drift"] < 1e-5 for step in steps)

    trained = PeftModel.from_pretrained(load_model(model_folder), run / "training" / "adapter")
    torch.testing.assert_close(_logits(trained), _logits(load_model(run / "training" / "model")), atol=1e-4, rtol=1e-4)
    folders = (adapter, run / "training" / "adapter")
    first, last = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert first.keys() == last.keys()
    assert not all(torch.equal(first[name], last[name]) for name in first)

    reports = []
    merged = PeftModel.from_pretrained(load_model(model_folder), adapter).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    make_tokenizer().save_pretrained(tmp_path / "merged")
    plain = make_run(tmp_path / "plain", config_values(tmp_path / "merged", tmp_path))
    shutil.copytree(run / "training", plain / "training")
    for each in (run, plain):
        (each / "evaluation").mkdir()
        reports.append(evaluate(each, each / "evaluation")["sets"][HELD_OUT]["policies"])
        AcceleratorState._reset_state(reset_partial_state=True)
    found, expected = reports
    assert found["base"] == expected["base"]

    _continue_from_the_checkpoint(run)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.e2e), True])
def test_embedding_and_head_are_trained_beside_an_adapter_and_continued_bit_for_bit(tmp_path: Path, tied: bool) -> None:
    folder = make_model(tmp_path / "model", tie_word_embeddings=tied)
    keys = {"lora_modules_to_save": ["embed_tokens", "lm_head"], "beta": 0.1, "save_steps": 2, **KEYS}
    run = _trained(folder, tmp_path, **keys)
    steps = metrics_of(run)
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-7), "the reference is the base, with its own embedding and head"
    assert steps[-1]["kl"] > 1e-5
    assert all(step["sampling/sync_drift"] < 1e-5 for step in steps)
    base, trained = (load_model(each) for each in (folder, run / "training" / "model"))
    for layer in ("get_input_embeddings", "get_output_embeddings"):
        assert not torch.equal(getattr(base, layer)().weight, getattr(trained, layer)().weight)
    assert trained.config.tie_word_embeddings == tied
    adapted = PeftModel.from_pretrained(load_model(folder), run / "training" / "adapter")
    torch.testing.assert_close(_logits(adapted), _logits(trained), atol=1e-4, rtol=1e-4)

    _continue_from_the_checkpoint(run)


def test_without_an_adapter_to_start_from_the_reference_is_the_base(model_folder: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", config_values(model_folder, tmp_path, beta=0.1, **KEYS))
    assert load_session(run).start is None
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"lora_r": 4}, "write lora_r = 3"),
        ({"lora_alpha": 6, "use_rslora": True}, "write lora_alpha = 12, use_rslora = false"),
        ({"lora_target_modules": None}, r'write lora_target_modules = \["down_proj", "q_proj"\]'),
        ({"lora_dropout": 0.1}, ""),
        ({"lora_target_modules": LAYERS[::-1]}, ""),
    ],
)
def test_an_adapter_that_the_other_keys_do_not_describe_is_refused_with_the_keys_that_do(
    model_folder: Path, adapter: Path, keys: dict[str, Any], said: str
) -> None:
    if said:
        with pytest.raises(ConfigError, match=said):
            check_adapter(_model(model_folder, adapter, **keys))
    else:
        check_adapter(_model(model_folder, adapter, **keys))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"peft_type": "LOHA"}, "peft_type = 'LOHA'"),
        ({"use_dora": True, "lora_bias": True}, "lora_bias = True, use_dora = True"),
        ({"alpha_pattern": {"q_proj": 64}}, "alpha_pattern = {'q_proj': 64}"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern = {'q_proj': 8}"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = 'pissa_niter_4'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights = 'olora'"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens = [1, 2]"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora = {'nblocks': 2}"),
        ({"of_another_peft": 3}, "of_another_peft = 3"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(
    model_folder: Path, adapter: Path, change: dict[str, Any], said: str
) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=f"an adapter with {re.escape(said)}, and only plain LoRA"):
        check_adapter(_model(model_folder, adapter))
    file.write_text("[]")
    with pytest.raises(ConfigError, match="is not an adapter's configuration"):
        check_adapter(_model(model_folder, adapter))
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no adapter_model\.safetensors there; name the folder of an adapter"):
        check_adapter(_model(model_folder, adapter))


# Keys of peft beside those that are described or harmless, with the value that leaves a plain LoRA.
PLAIN: dict[str, Any] = {
    "bias": "none",
    "init_lora_weights": True,
    "use_dora": False,
    "use_qalora": False,
    "lora_bias": False,
    "alpha_pattern": {},
    "rank_pattern": {},
    "layer_replication": None,
    "trainable_token_indices": None,
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "kasa_config": None,
    "megatron_config": None,
    "monteclora_config": None,
    "use_bdlora": None,
    "velora_config": None,
}


def test_every_key_of_the_installed_peft_is_known() -> None:
    """A key that a new peft brings is read as a change of the function until someone has looked at it."""
    assert {*LoraConfig().to_dict(), "runtime_config"} == {*PLAIN, *HARMLESS, *DESCRIBED}
    assert [*_not_plain(LoraConfig().to_dict())] == []
    config = LoraConfig().to_dict()
    assert {key: config[key] for key in PLAIN} == PLAIN


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("two_layers"))


@pytest.mark.parametrize(
    ("given", "targets"),
    [
        ({"target_modules": r".*\.(q_proj|v_proj)"}, ["q_proj", "v_proj"]),
        ({"target_modules": r".*layers\.1\..*\.(q_proj|v_proj)"}, [f"model.layers.1.self_attn.{x}_proj" for x in "qv"]),
        (
            {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["v_proj", "layers.0.self_attn.q_proj"]},
            ["model.layers.1.self_attn.q_proj"],
        ),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0]}, ["model.layers.0.self_attn.q_proj"]),
    ],
)
def test_an_adapter_of_layers_by_a_pattern_is_continued_by_the_layers_that_its_tensors_name(
    two_layers: Path, tmp_path: Path, given: dict[str, Any], targets: list[str]
) -> None:
    torch.manual_seed(5)
    peft = get_peft_model(load_model(two_layers), LoraConfig(r=3, lora_alpha=12, init_lora_weights=False, **given))
    peft.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=re.escape(f"write lora_target_modules = {json.dumps(targets)}")):
        check_adapter(_model(two_layers, tmp_path / "adapter"))
    config = _model(two_layers, tmp_path / "adapter", lora_target_modules=targets)
    check_adapter(config)
    (tmp_path / "elsewhere").mkdir()
    check_adapter(config.model_copy(update={"name_or_path": str(tmp_path / "elsewhere")}))
    expected = _logits(PeftModel.from_pretrained(load_model(two_layers), tmp_path / "adapter"))
    torch.testing.assert_close(_logits(with_adapter(load_model(two_layers), config)), expected)


def test_tensors_of_another_rank_than_the_configuration_says_are_refused(model_folder: Path, adapter: Path) -> None:
    """A tensor of rank 1 would be copied into every row."""
    file = adapter / "adapter_model.safetensors"
    save_file({n: t[:1] if "lora_A" in n else t[:, :1].contiguous() for n, t in load_file(file).items()}, file)
    with pytest.raises(
        ConfigError, match=r"is \(1, 64\) in its file and \(3, 64\) here, and 3 more are unlike; merge it"
    ):
        with_adapter(load_model(model_folder), _model(model_folder, adapter))


@pytest.mark.slow
@pytest.mark.parametrize("precision", [pytest.param("no", marks=pytest.mark.e2e), "bf16"])
def test_a_training_over_4_bits_samples_what_it_trains_and_is_continued_bit_for_bit(
    tmp_path: Path, precision: str
) -> None:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    folder = make_model(tmp_path / "model")
    keys = {"load_in_4bit": True, "beta": 0.1, "save_steps": 2, "mixed_precision": precision, **KEYS}
    run = _trained(folder, tmp_path, **keys)
    steps = metrics_of(run)
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-7 if precision == "no" else 1e-2)
    assert steps[-1]["kl"] > 1e-5
    assert all(step["sampling/sync_drift"] < (1e-5 if precision == "no" else 0.1) for step in steps)
    dtype, rounding = (torch.float32, 1e-4) if precision == "no" else (torch.bfloat16, 0.1)
    adapted = PeftModel.from_pretrained(load_model(folder, dtype=dtype, in_4bit=True), run / "training" / "adapter")
    trained = load_model(run / "training" / "model")
    torch.testing.assert_close(_logits(adapted), _logits(trained), atol=rounding, rtol=rounding, check_dtype=False)

    _continue_from_the_checkpoint(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "targets", [["q_proj", "gate_proj", "up_proj", "down_proj"], pytest.param(["q_proj"], marks=pytest.mark.e2e)]
)
def test_an_adapter_of_a_mixture_of_experts_is_trained_saved_and_continued_bit_for_bit(
    tmp_path: Path, targets: list[str]
) -> None:
    folder = make_model(tmp_path / "model", "Qwen3Moe", num_experts=4, num_experts_per_tok=2, head_dim=32)
    keys = {**KEYS, "lora_target_modules": targets, "beta": 0.1, "save_steps": 2}
    run = _trained(folder, tmp_path, **keys)
    steps = metrics_of(run)
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-7)
    assert steps[-1]["kl"] > 1e-5
    assert all(step["sampling/sync_drift"] < 1e-5 for step in steps)
    base, trained = (load_model(each).state_dict() for each in (folder, run / "training" / "model"))
    moved = {
        name.split(".")[-2 if "weight" in name else -1] for name in base if not torch.equal(base[name], trained[name])
    }
    assert moved == ({"q_proj", "gate_up_proj", "down_proj"} if len(targets) > 1 else {"q_proj"})
    adapted = PeftModel.from_pretrained(load_model(folder), run / "training" / "adapter")
    found = _logits(load_model(run / "training" / "model"))
    torch.testing.assert_close(_logits(adapted), found, atol=1e-4, rtol=1e-4)

    _continue_from_the_checkpoint(run)
