"""Forecasts of sharded trainings: memory and traffic against what torch's FSDP2 counts, shares against arithmetic."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import MergeModulelist

from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from grpo_core.planning.architectures.families import FAMILIES, FUSED
from grpo_core.planning.forecast import _check_experts, communication, forecast, forecast_rows
from grpo_core.planning.hardware import Gpu, named_gpu
from grpo_core.planning.memory import GIB, peak_memory
from grpo_core.planning.passes import Pass, activations, working_set
from grpo_core.planning.plan import Plan, make_plan, plan_inputs
from grpo_core.planning.shapes import ModelShape, PromptLengths, adapter_parameters, model_shape
from grpo_core.system.torch_releases import GATHER, REDUCE
from tests.conftest import config_values
from tests.qwen import QWEN, planned, qwen

W = 4
SMALL = 50_000  # bytes of what is not forecast: inputs, buffers, the optimizer's counters of steps
SIZES = {
    "vocab_size": 2000,
    "hidden_size": 256,
    "intermediate_size": 700,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "head_dim": 64}
LENGTHS = PromptLengths(10, 10, "given")


def _config(**keys: Any) -> RunConfig:
    values = {"sharding": "full", "num_processes": W, "mixed_precision": "bf16", "engine": "vllm"}
    return parse_config(config_values(Path("model"), Path("data"), **(values | keys)))


def _plan(config: RunConfig) -> Plan:
    return make_plan(plan_inputs(config, 1000))


def _communication(config: RunConfig, shape: ModelShape, gpu: Gpu) -> dict[str, Any]:
    """What is sent in one pass per micro-step."""
    return communication(planned(config, shape, LENGTHS, gpu), config.train.gradient_accumulation_steps)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Four processes, of which this is one and the others are not there: nothing arrives, everything is counted."""
    dist.init_process_group("fake", rank=0, world_size=W, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("machines", "processes"))
    dist.destroy_process_group()


def _sharded(config: Any, bf16: bool, mesh: DeviceMesh) -> tuple[Any, torch.optim.Optimizer]:
    """A model sharded over the mesh, and an optimizer that has its state."""
    model = AutoModelForCausalLM.from_config(config)
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _passes(model: Any, vocabulary: int, tokens: int, number: int) -> Iterator[None]:
    ids = torch.randint(0, vocabulary, (1, tokens))
    for _ in range(number):
        yield
        model(ids, logits_to_keep=1).logits.float().sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "float32"])
@pytest.mark.parametrize(
    ("sizes", "tokens", "recomputed"),
    [
        ({}, 16, False),
        pytest.param({}, 300, False, marks=pytest.mark.e2e),
        ({"num_hidden_layers": 8}, 300, True),
        pytest.param({"vocab_size": 20_000}, 16, False, marks=pytest.mark.e2e),
        pytest.param({"vocab_size": 20_000, "tie_word_embeddings": True}, 16, False, marks=pytest.mark.e2e),
        pytest.param({"intermediate_size": 4000}, 16, False, marks=pytest.mark.e2e),
    ],
    ids=["ordinary", "many tokens", "recomputing", "large vocabulary", "tied", "large layers"],
)
def test_memory_of_a_sharded_pass_is_what_torch_counts_at_its_peak(
    sizes: dict[str, Any], tokens: int, recomputed: bool, bf16: bool, mesh: DeviceMesh
) -> None:
    """In the second pass, where the gradients of the first are held: never less, and not much more."""
    config = Qwen2Config(**{**SIZES, "tie_word_embeddings": False, **sizes})
    model, optimizer = _sharded(config, bf16, mesh._flatten())
    if recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    tracker = FSDPMemTracker(model, optimizer)
    with tracker:
        for _ in _passes(model, config.vocab_size, tokens, 2):
            tracker.reset_mod_stats()
    measured = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]

    keys = {"mixed_precision": "bf16" if bf16 else "no", "gradient_checkpointing": recomputed}
    keys |= {"per_device_train_batch_size": 1, "num_generations": 4, "gradient_accumulation_steps": 1}
    run, shape = _config(**keys, max_completion_length=1), model_shape(config.to_dict())
    parts = peak_memory(planned(run, shape, LENGTHS, Gpu("GPU")))["parts_gib"]
    held = sum(parts[name] for name in ("weights", "optimizer", "gradients")) * GIB
    # Here the logits are those of one token, and their gradient is the output layer's, without a float32 sum.
    size = Pass(tokens, 2 * tokens, 1)  # two heads share keys, and have them apart
    found = activations(run, shape, size)
    besides = max(found.in_norm, found.in_layer - found.outside)
    passes = working_set(run, shape, found.kept, besides, 8 * config.vocab_size, 0)
    assert measured - SMALL <= held + sum(passes.values()) <= 1.3 * measured


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "float32"])
@pytest.mark.parametrize("sharding", ["full", "hybrid"])
@pytest.mark.parametrize("experts", [False, True], ids=["plain", "experts"])
def test_communication_is_what_fsdp_sends(
    sharding: str, bf16: bool, experts: bool, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two passes per update; by the sizes of what FSDP2 gives to the collectives, of which a process has a part."""
    config: Any = Qwen3MoeConfig(**SIZES, **EXPERTS) if experts else Qwen2Config(**SIZES, tie_word_embeddings=False)
    model, _ = _sharded(config, bf16, mesh if sharding == "hybrid" else mesh._flatten())
    sizes: dict[str, float] = {}

    def count(name: str) -> None:
        collective = getattr(dist, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            given = [it for it in (*args, *kwargs.values()) if isinstance(it, torch.Tensor)]
            sizes[name] = sizes.get(name, 0) + max(it.nbytes for it in given)  # the whole array, not a share of it
            return collective(*args, **kwargs)

        monkeypatch.setattr(dist, name, counted)

    for name in (GATHER, REDUCE, "all_reduce"):
        count(name)
    for _ in _passes(model, config.vocab_size, 16, 2):
        pass

    run = _config(sharding=sharding, mixed_precision="bf16" if bf16 else "no", gradient_accumulation_steps=2)
    shape = model_shape(config.to_dict())
    found = _communication(run, shape, Gpu("GPU", per_machine=2))["parts_gib"]
    others = 3 / 4 if sharding == "full" else 1 / 2
    handed_over = (2 if bf16 else 4) * shape.parameters  # to the engine, after the update
    assert found["gathered"] * GIB == pytest.approx(others * (sizes[GATHER] + handed_over))
    # An all-reduce over two sends every byte once: half to be summed, half of the sums.
    summed = sizes.get("all_reduce", 0.0)
    assert bool(summed) == (sharding == "hybrid")
    assert found["reduced"] * GIB == pytest.approx(others * sizes[REDUCE] + summed)


@pytest.mark.parametrize(
    ("keys", "bytes_per_parameter"),
    [
        ({}, {"weights": 1, "gradients": 1, "optimizer": 2, "bf16_copy": 0, "engine_weights": 2, "reference": 0}),
        ({"mixed_precision": "no"}, {"weights": 1, "optimizer": 2, "bf16_copy": 0, "engine_weights": 4}),
        ({"vllm_tensor_parallel_size": 4}, {"engine_weights": 0.5}),
        ({"engine": "vllm-server"}, {"engine_weights": 0}),  # the copy to send is in the host's memory
        ({"engine": "transformers"}, {"engine_weights": 2}),  # each process has a whole copy to sample with
        ({"engine": "transformers", "sharding": "none"}, {"weights": 4, "bf16_copy": 2, "engine_weights": 0}),
        ({"beta": 0.1}, {"reference": 0.5}),
        ({"beta": 0.1, "sync_ref_model": True}, {"reference": 1}),
        ({"optim": "adamw_8bit"}, {"weights": 1, "gradients": 1, "optimizer": (2 + 2 * 4 / 256) / 4}),
        ({"sharding": "hybrid"}, {"weights": 2, "gradients": 2, "optimizer": 4}),  # two processes per machine
    ],
)
def test_shares_are_parts_of_what_one_process_would_hold(
    keys: dict[str, Any], bytes_per_parameter: dict[str, float]
) -> None:
    config, shape = _config(**keys), qwen("0.5B")
    parts = peak_memory(planned(config, shape, LENGTHS, Gpu("GPU", 80.0, per_machine=2)))["parts_gib"]
    found = {name: parts[name] * GIB / shape.parameters for name in bytes_per_parameter}
    assert found == pytest.approx(bytes_per_parameter)


def test_a_frozen_base_is_shared_and_its_adapter_is_not() -> None:
    config, shape = _config(use_peft=True, lora_r=16), qwen("7B")
    parts = peak_memory(planned(config, shape, LENGTHS, Gpu("GPU", 80.0)))["parts_gib"]
    adapter = adapter_parameters(shape, config)
    sizes = {"weights": 4 * adapter, "gradients": 4 * adapter, "optimizer": 8 * adapter}
    sizes["bf16_copy"] = 2 * shape.parameters / W + 2 * adapter
    assert {name: parts[name] * GIB for name in sizes} == pytest.approx(sizes)
    assert parts["gathered"] > 0
    largest = 152_064 * 3584  # the embedding
    assert parts["merged_base"] * GIB == pytest.approx(4 * (shape.parameters / W + largest + adapter))
    assert not {"unsharded_gradients", "reduce_scatter"} & parts.keys()


def test_a_base_that_is_merged_at_the_end_counts_where_it_is_more_than_training_and_sampling_need() -> None:
    keys = {"use_peft": True, "gradient_checkpointing": True, "engine": "vllm-server", "per_device_train_batch_size": 1}
    config, shape = _config(num_processes=2, num_generations=2, steps_per_generation=1, **keys), qwen("32B")
    found = peak_memory(planned(config, shape, LENGTHS, Gpu("GPU", 80.0)))
    parts = found["parts_gib"]
    held = sum(parts[name] for name in ("weights", "optimizer", "reference", "bf16_copy", "engine_weights"))
    assert found["peak_memory_gib"] == pytest.approx(held + parts["merged_base"])


def test_processes_per_machine_are_those_of_this_machine_or_assumed() -> None:
    config, shape = _config(sharding="hybrid", num_processes=16), qwen("7B")
    shares = {}
    for gpu in (Gpu("GPU", 80.0), Gpu("GPU", 80.0, per_machine=4)):
        found = peak_memory(planned(config, shape, LENGTHS, gpu))
        shares[found["parts_gib"]["optimizer"]] = "8 GPUs per machine are assumed" in found["how"]
    assert shares == {8 * shape.parameters / 8 / GIB: True, 8 * shape.parameters / 4 / GIB: False}


def test_processes_per_machine_are_those_configured_with_several_machines() -> None:
    config, shape = _config(sharding="hybrid", num_processes=16), qwen("7B")
    values = config.model_dump(exclude_none=True)
    values["train"]["num_machines"] = 4
    values["launch"] = {"launcher": "ssh", "hosts": ["a", "b", "c", "d"]}
    config = parse_config(values)
    found = peak_memory(planned(config, shape, LENGTHS, Gpu("GPU", 80.0, per_machine=2)))
    assert found["parts_gib"]["optimizer"] == 8 * shape.parameters / 4 / GIB
    assert "16 processes on 4 machines" in _communication(config, shape, named_gpu("H100"))["how"]
    assert "assumed" not in found["how"]


def test_traffic_between_machines_is_counted_per_machine_and_the_slower_way() -> None:
    """16 processes on two machines: half of what a machine needs is in the other one."""
    shape = qwen("7B")

    def found(**keys: Any) -> dict[str, Any]:
        config = _config(num_processes=16, gradient_accumulation_steps=1, **keys)
        return _communication(config, shape, named_gpu("H100"))

    passes, whole = 2 * (2 * shape.parameters - shape.outside), 2 * shape.parameters
    crossing = {
        mode: found(sharding=mode)["parts_gib"]["between_machines"] * GIB for mode in ("none", "full", "hybrid")
    }
    gradients = 4 * shape.parameters
    assert crossing == pytest.approx({"none": gradients, "hybrid": gradients, "full": (passes + whole + gradients) / 2})
    lora = found(use_peft=True)
    adapter = adapter_parameters(shape, _config(use_peft=True))
    assert lora["parts_gib"]["reduced"] * GIB == pytest.approx(2 * 15 / 16 * 4 * adapter)
    assert lora["parts_gib"]["gathered"] * GIB == pytest.approx(15 / 16 * passes)
    full = found()
    within = full["parts_gib"]["gathered"] + full["parts_gib"]["reduced"]
    seconds = within * GIB / 300e9 + crossing["full"] / 25e9
    assert full["seconds_per_update"] == pytest.approx(seconds)
    assert "300 GB/s per GPU within a machine, 25 GB/s per machine to the others" in full["how"]


@pytest.mark.parametrize(("beta", "num_iterations", "scorings"), [(0.1, 1, 1), (0.0, 2, 1), (0.1, 2, 2)])
def test_scoring_gathers_every_weight_once(beta: float, num_iterations: int, scorings: int) -> None:
    """Two micro-steps per rollout, each scored once per policy that is asked, before `num_iterations` updates of it."""
    shape = qwen("7B")

    def gathered(**keys: Any) -> float:
        config = _config(gradient_accumulation_steps=2, **keys)
        return _communication(config, shape, named_gpu("H100"))["parts_gib"]["gathered"] * GIB

    rollouts_per_update = 1 / num_iterations
    passes, whole = 2 * 2 * (2 * shape.parameters - shape.outside), 2 * shape.parameters
    expected = 3 / 4 * (passes + rollouts_per_update * (1 + 2 * scorings) * whole)
    assert gathered(beta=beta, num_iterations=num_iterations) == pytest.approx(expected)


@pytest.mark.parametrize("beta", [None, 0.5])
def test_a_teacher_is_gathered_once_per_micro_step_or_for_a_divergence_in_each_pass(beta: float | None) -> None:
    """Two updates on each rollout of two micro-steps; a divergence keeps its head whole in the passes."""
    shape, teachers = qwen("1.5B"), [qwen("7B")]
    alone = _config(gradient_accumulation_steps=2, num_iterations=2)
    values = alone.model_dump(exclude_none=True)
    values["teacher"] |= {"model": "7B"} | ({} if beta is None else {"divergence_beta": beta})
    gathered, parts = [], []
    for config, those in ((alone, []), (RunConfig.model_validate(values), teachers)):
        run = planned(config, shape, LENGTHS, named_gpu("H200"), *those)
        gathered.append(communication(run, 2)["parts_gib"]["gathered"] * GIB)
        parts.append(peak_memory(run)["parts_gib"])
    per_update = 2 / 2 if beta is None else 2
    weights = sum(it.parameters for it in teachers)
    assert gathered[1] - gathered[0] == pytest.approx(3 / 4 * per_update * 2 * weights)
    heads = (
        {}
        if beta is None
        else {"teacher_head": pytest.approx(2 * sum(it.vocabulary * it.hidden for it in teachers) / GIB)}
    )
    assert {name: size for name, size in parts[1].items() if name == "teacher_head"} == heads
    assert parts[1]["teacher"] * GIB == pytest.approx(2 * weights / W)


@pytest.mark.parametrize("processes", [1, 8])
def test_a_plan_shows_communication_of_several_processes(processes: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN["7B"]))
    keys = {"sharding": "full" if processes > 1 else "none", "num_processes": processes, "name_or_path": str(tmp_path)}
    config = _config(**keys, vllm_tensor_parallel_size=processes)
    found = forecast(config, _plan(config), LENGTHS, "not measured", [], named_gpu("H200"))
    rows = {what.strip(): (value, how) for what, value, how in forecast_rows(found)}
    assert ("communication per update" in rows) == ("gathered" in rows) == (processes > 1)
    assert processes == 1 or "8 processes on 1 machine" in rows["communication per update"][1]
    json.dumps(found)


def test_a_model_of_an_unknown_family_has_no_forecast_of_its_shares(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    config = _config(name_or_path=str(tmp_path))
    found = forecast(config, _plan(config), LENGTHS, "not measured", [], named_gpu("H200"))
    assert set(found) == {"memory", "time"}
    assert "model_type 'mamba': memory is forecast for llama" in found["memory"]["error"]


MIXTURES = [kind for kind in FAMILIES if "moe" in kind or kind in ("mixtral", "gpt_oss", "jamba")]


@pytest.mark.parametrize("kind", MIXTURES)
def test_the_experts_of_checkpoints_are_in_one_tensor_where_transformers_stacks_none(kind: str) -> None:
    stacks = {
        type(operation)
        for each in get_checkpoint_conversion_mapping(kind) or []
        for operation in getattr(each, "operations", [])
    }
    assert (kind in FUSED) == (MergeModulelist not in stacks)


@pytest.mark.parametrize("experts", [4, 8, 128])
def test_processes_that_would_hold_no_expert_are_refused(experts: int) -> None:
    """torch.chunk is how FSDP2 splits a tensor."""
    sizes = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    mixture = model_shape({**QWEN["7B"], "model_type": "qwen3_moe", **sizes})
    for processes in range(2, 25):
        config = parse_config(config_values(Path("model"), Path("data"), sharding="full", num_processes=processes))
        if len(torch.arange(experts).chunk(processes)) == processes:
            _check_experts(config, "mixture", mixture, None)
            continue
        with pytest.raises(
            ConfigError, match=f"of the {experts} experts of a layer of 'mixture'.* share the model by"
        ) as refused:
            _check_experts(config, "mixture", mixture, None)
        fewer = int(re.findall(r"by (\d+) processes$", str(refused.value))[0])
        assert len(torch.arange(experts).chunk(fewer)) == fewer < processes
        _check_experts(config, "mixture", replace(mixture, fused_experts=True), None)


def test_a_teacher_of_which_processes_would_hold_no_expert_is_refused_too(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    for name, values in {"model": {}, "teacher": {"model_type": "qwen3_moe", **sizes}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**QWEN["7B"], **values}))
    values = config_values(tmp_path / "model", Path("data"), sharding="full", num_processes=3)
    config = parse_config({**values, "teacher": {"model": str(tmp_path / "teacher")}})
    plan = make_plan(plan_inputs(config, 24))
    with pytest.raises(ConfigError, match=r"of the 4 experts of a layer of '.*/teacher'"):
        forecast(config, plan, PromptLengths(8.0, 8, "given"), "no pace", [], None)
