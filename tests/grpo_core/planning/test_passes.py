"""What a pass takes of a GPU's memory, against a GPU's own counts and torch's; and how many tokens are chosen by it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from grpo_core.fingerprint import determining, planned_values
from grpo_core.model import fused_logprobs, logprobs, packed_attention
from grpo_core.model import policy as policies
from grpo_core.model.capabilities import decoder
from grpo_core.model.loading import with_adapter
from grpo_core.model.packed_attention import PackedBatch, use_attention
from grpo_core.model.packed_attention import _Varlen as _Sequences
from grpo_core.model.sequences import Sequences, pack
from grpo_core.planning.forecast import forecast
from grpo_core.planning.hardware import Gpu, named_gpu
from grpo_core.planning.memory import GIB, beside_training, peak_memory, scoring_pass, training_parts, usable_gib
from grpo_core.planning.passes import Pass, activations, longest_sequence, most_tokens, passes_per_update, planned_pass
from grpo_core.planning.plan import Plan, read_plan
from grpo_core.planning.shapes import PromptLengths, model_shape, rank_of
from grpo_core.planning.tokens_per_pass import STEP, choose_tokens, with_tokens_per_pass
from tests.grpo_core.allocations import Allocations
from tests.grpo_core.planning.test_forecast import config_with, plan_of
from tests.qwen import QWEN, planned, with_tokens

WORD_PROBLEMS = {"max_completion_length": 512, "num_generations": 8, "gradient_accumulation_steps": 1}
LENGTHS = PromptLengths(140, 220, "given")


def _on_gpu(**keys: Any) -> RunConfig:
    return config_with(**{"mixed_precision": "bf16", "engine": "transformers", **WORD_PROBLEMS, **keys})


# torch.cuda.max_memory_allocated of trainings on one H200 (torch 2.11, transformers 5.17, float32 masters, bfloat16
# passes): random weights in Qwen2.5's shapes, prompts of 60 to 220 tokens with 8 completions of at most 512, of which
# each update is one pass. The sizes are those of the largest pass: its inputs (a completion's last token is none), keys
# and completion tokens, without the completions that had no advantage. The output layer had two chunks of bfloat16
# logits at the same time, as many bytes as one of float32.
@pytest.mark.parametrize(
    ("model", "completions", "size", "measured"),
    [
        pytest.param("0.5B", 128, (30359, 50263, 27999), 47.3, id="a mixture of lengths"),
        pytest.param("0.5B", 128, (30359, 50263, 27999), 47.52, id="the same in another training"),
        pytest.param("0.5B", 128, (29347, 48623, 26983), 46.31, id="without 4 of the completions"),
        pytest.param("0.5B", 128, (67896, 87800, 65536), 96.53, id="all of greatest length"),
        pytest.param("1.5B", 64, (15420, 25644, 14206), 64.24, id="a mixture, 1.5B"),
    ],
)
def test_a_pass_takes_what_was_measured_on_a_gpu(
    model: str, completions: int, size: tuple[int, int, int], measured: float
) -> None:
    run = planned(_on_gpu(per_device_train_batch_size=completions), model, LENGTHS, named_gpu("H200"))
    told = peak_memory(run, Pass(*size, alone=True))
    assert told["peak_memory_gib"] == pytest.approx(measured, rel=0.01)


def test_the_plan_s_own_pass_has_completions_of_full_length_after_the_longest_prompts() -> None:
    """Which took 96.53 GiB, with prompts of 140 tokens in the mean."""
    told = peak_memory(planned(_on_gpu(per_device_train_batch_size=128), "0.5B", LENGTHS, named_gpu("H200")))
    assert told["tokens_per_pass"] == 16 * 220 + 128 * 512
    assert told["peak_memory_gib"] == pytest.approx(96.53, rel=0.01)


def test_what_ran_out_of_a_gpu_s_memory_is_not_chosen_for_it_and_what_fitted_is_not_more() -> None:
    """With 1,024 completions in an update, passes of 224,218 and then of 110,106 tokens ran out of an H200's memory,
    those of 55,053 did not."""
    run = planned(_on_gpu(per_device_train_batch_size=1024), "0.5B", LENGTHS, named_gpu("H200"))
    tokens = choose_tokens(run)
    assert tokens is not None and 55_053 < tokens < 110_106
    for number, fits in ((55_053, True), (110_106, False), (224_218, False)):
        assert ("warning" not in peak_memory(with_tokens(run, number))) == fits


class _Varlen(torch.autograd.Function):
    """Takes the memory of flash attention's kernel, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = value.new_zeros(*query.shape[:2], value.shape[2])
        log_sums = torch.zeros(query.shape[1], query.shape[0])
        ctx.save_for_backward(query, key, value, output, log_sums)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(given) for given in ctx.saved_tensors[:3])


@pytest.fixture
def gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes as a GPU makes them; its own kernels take their memory and compute nothing."""

    def packed(model: Any, *_: Any, **options: Any) -> tuple[str, str]:
        use_attention(decoder(model))
        return "varlen", ""

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *_, **options: None

    monkeypatch.setattr(packed_attention, "varlen_attn", lambda q, k, v, *_, **options: _Varlen.apply(q, k, v))
    monkeypatch.setattr(policies, "make_packable", packed)
    monkeypatch.setattr(policies, "why_not_packed", lambda _: "")
    monkeypatch.setattr(policies, "check_recomputing", lambda _: None)
    monkeypatch.setattr(policies, "plain_output_layer", lambda model: model.get_output_embeddings())
    monkeypatch.setattr(logprobs, "FUSED", ("cpu",))
    monkeypatch.setattr(fused_logprobs, "_statistics_kernel", Kernel())
    monkeypatch.setattr(fused_logprobs, "_gradient_kernel", Kernel())
    monkeypatch.setattr(fused_logprobs, "_add_product", lambda *_: None)


SIZES = {"vocab_size": 200, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 2}
FAMILIES = {
    "Qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "Llama": LlamaConfig(**SIZES),
    "Mistral": MistralConfig(**SIZES, sliding_window=None),
    "Qwen3": Qwen3Config(**SIZES, head_dim=32),
}
ROWS, GROUP, PROMPT, COMPLETION = 8, 4, 40, 100


def _policy(family: str, config: RunConfig) -> policies.Policy:
    dtype = torch.bfloat16 if config.model.use_peft else torch.float32
    model = with_adapter(AutoModelForCausalLM.from_config(FAMILIES[family], dtype=dtype).eval(), config.model)
    return policies.Policy(model, 1.0, bf16=True, gradient_checkpointing=config.train.gradient_checkpointing)


@pytest.mark.parametrize(
    ("family", "keys", "passes"),
    [
        *((family, {}, 1) for family in FAMILIES),
        ("Qwen2", {}, 2),
        ("Llama", {"gradient_checkpointing": True}, 1),
        ("Qwen3", {"gradient_checkpointing": True}, 2),
        ("Llama", {"use_peft": True}, 1),
        ("Qwen3", {"use_peft": True, "lora_target_modules": ["q_proj", "down_proj"]}, 2),
        ("Qwen2", {"use_peft": True, "lora_dropout": 0.1}, 1),
        ("Qwen2", {"use_peft": True, "gradient_checkpointing": True}, 1),
    ],
)
def test_what_a_pass_keeps_and_takes_is_what_torch_counts(
    gpu_kernels: None, family: str, keys: dict[str, Any], passes: int
) -> None:
    """Bytes after the forward pass, and at the worst moment of an update. An adapter's first layer keeps a little less:
    what comes before it has no gradient."""
    config, rows = config_with(mixed_precision="bf16", **keys), torch.arange(ROWS)
    policy, allocations = _policy(family, config), Allocations()
    ids = torch.zeros(ROWS, PROMPT + COMPLETION, dtype=torch.int64)
    lengths = torch.full_like(rows, PROMPT), torch.full_like(rows, COMPLETION)
    inputs = policy.prepare(Sequences(ids, *lengths, rows // GROUP))
    for _ in range(passes):
        with allocations, policy.dropout():
            gradients = allocations.now()
            chosen, _ = policy(inputs)
            kept = allocations.now() - gradients
            chosen.sum().backward()

    shape, tokens = model_shape(FAMILIES[family].to_dict()), inputs.tokens
    assert isinstance(tokens, PackedBatch) and isinstance(tokens.attention, _Sequences)
    size = Pass(tokens.input_ids.shape[1], len(tokens.attention.keys), len(tokens.predicts), alone=passes == 1)
    adapted = sum(number * it.inputs for it, number in shape.linear if rank_of(it, config))
    masks = size.tokens * adapted * bool(config.model.lora_dropout)
    told = activations(config, shape, size).kept + masks  # a CPU's mask has two bytes per element
    worst = sum(training_parts(planned(config, shape, LENGTHS, Gpu("GPU")), size).values()) + masks
    assert kept == pytest.approx(told, rel=0.04 if config.model.use_peft else 0.015 if keys else 0.003)
    assert 0.95 <= allocations.peak / worst <= 1.005


@pytest.mark.parametrize(
    ("family", "vocabulary"), [*((family, 200) for family in FAMILIES), (next(iter(FAMILIES)), 20_000)]
)
def test_a_pass_of_a_teacher_takes_what_torch_counts(
    gpu_kernels: None, monkeypatch: pytest.MonkeyPatch, family: str, vocabulary: int
) -> None:
    """Whether a layer or a chunk of logits takes the most."""
    monkeypatch.setattr(logprobs, "CAST", 1)  # of a CPU alone
    config, rows = config_with(mixed_precision="bf16"), torch.arange(ROWS)
    shape = FAMILIES[family].from_dict({**FAMILIES[family].to_dict(), "vocab_size": vocabulary})
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).eval().requires_grad_(False)
    policy, allocations = policies.Policy(model, 1.0), Allocations()
    ids = torch.zeros(ROWS, PROMPT + COMPLETION, dtype=torch.int64)
    lengths = torch.full_like(rows, PROMPT), torch.full_like(rows, COMPLETION)
    inputs = policy.prepare(Sequences(ids, *lengths, rows // GROUP))
    with torch.no_grad(), allocations:
        policy(inputs)
    tokens = inputs.tokens
    assert isinstance(tokens, PackedBatch) and isinstance(tokens.attention, _Sequences)
    size = Pass(tokens.input_ids.shape[1], len(tokens.attention.keys), len(tokens.predicts))
    told = scoring_pass(config, model_shape(shape.to_dict()), size)
    assert 0.7 <= allocations.peak / told <= 1.005


@pytest.mark.parametrize("teacher", [{"model": "teacher"}, {"template": "{prompt}!"}])
@pytest.mark.parametrize(
    ("vocabulary", "beta", "top_k"), [(200, 0.0, 0), (200, 1.0, 0), (4_000, 0.5, 0), (4_000, 0.5, 20)]
)
def test_a_pass_with_a_divergence_takes_no_more_than_is_told(
    gpu_kernels: None,
    monkeypatch: pytest.MonkeyPatch,
    vocabulary: int,
    beta: float,
    top_k: int,
    teacher: dict[str, str],
) -> None:
    """Another model's, or the policy's own."""
    monkeypatch.setattr(logprobs, "CAST", 1)  # of a CPU alone
    rows, values = torch.arange(ROWS), config_with(mixed_precision="bf16").model_dump()
    values["teacher"] |= teacher | {"divergence_beta": beta, "divergence_top_k": top_k}
    config = RunConfig.model_validate(values)
    shapes = [
        Qwen2Config(**SIZES | {"vocab_size": vocabulary, "hidden_size": width}, tie_word_embeddings=True)
        for width in (128, 256)
    ]
    models = [AutoModelForCausalLM.from_config(shape, dtype=dtype).eval() for shape, dtype in
              zip(shapes, (torch.float32, torch.bfloat16), strict=True)]  # fmt: skip
    policy = policies.Policy(models[0], 1.0, bf16=True)
    teaching = policies.Policy(models[1].requires_grad_(False), 1.0) if "model" in teacher else policy
    ids = torch.zeros(ROWS, PROMPT + COMPLETION, dtype=torch.int64)
    lengths = torch.full_like(rows, PROMPT), torch.full_like(rows, COMPLETION)
    sequences, allocations = Sequences(ids, *lengths, rows // GROUP), Allocations()
    inputs = policy.prepare(sequences)
    with allocations:
        chosen, _, found, _ = policy(inputs, taught=[teaching.as_teacher(sequences, rows, beta, top_k)])
        (chosen.sum() + found.sum()).backward()
    tokens = inputs.tokens
    assert isinstance(tokens, PackedBatch) and isinstance(tokens.attention, _Sequences)
    size = Pass(tokens.input_ids.shape[1], len(tokens.attention.keys), len(tokens.predicts), alone=True)
    others = [model_shape(shapes[1].to_dict())] if "model" in teacher else []
    run = planned(config, model_shape(shapes[0].to_dict()), LENGTHS, Gpu("GPU"), *others)
    told = sum(training_parts(run, size).values())
    assert 0.4 <= allocations.peak / told <= 1.005


def test_one_chunk_of_logits_is_in_memory_at_a_time(gpu_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the backward pass, while the next chunk's are made."""
    chunk, vocabulary, width = 64, 1000, 8
    monkeypatch.setattr(fused_logprobs, "chunk_tokens", lambda *_: chunk)
    peaks = []
    for tokens in (chunk, 4 * chunk):
        hidden = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(vocabulary, width, dtype=torch.bfloat16, requires_grad=True)
        with Allocations() as allocations:
            chosen, _ = logprobs.chosen_logprobs(hidden, weight, torch.zeros(tokens, dtype=torch.int64), 1.0)
            chosen.sum().backward()
        peaks.append(allocations.peak)
    assert peaks[1] - peaks[0] < chunk * vocabulary  # bytes; a chunk has two or more per logit


CHOICES = st.fixed_dictionaries(
    {
        "per_device_train_batch_size": st.sampled_from([1, 3, 8, 64, 512]),
        "gradient_accumulation_steps": st.sampled_from([8, 16]),
        "num_processes": st.sampled_from([1, 8]),
        "max_completion_length": st.sampled_from([16, 512, 8192]),
        "engine": st.sampled_from(["vllm", "vllm-server", "transformers"]),
        "gpu_memory_utilization": st.sampled_from([0.3, 0.9]),
        "mixed_precision": st.sampled_from(["no", "bf16"]),
        "gradient_checkpointing": st.booleans(),
        "use_peft": st.booleans(),
        "sharded": st.booleans(),
        "beta": st.sampled_from([0.0, 0.1]),
    }
)


@settings(max_examples=5 * settings.default.max_examples)
@given(CHOICES, st.sampled_from([*QWEN]), st.integers(1, 6000), st.floats(2, 200))
def test_the_tokens_chosen_are_the_most_that_fit(keys: dict[str, Any], model: str, prompt: int, memory: float) -> None:
    """Within one step; never fewer than the longest sequence has, nor more than a pass can use. More memory never means
    fewer."""
    sharded = keys.pop("sharded") and keys["num_processes"] > 1
    config = _on_gpu(**keys, **({"sharding": "full"} if sharded else {}))
    lengths = PromptLengths(prompt, prompt, "given")
    run = planned(config, model, lengths, Gpu("GPU", memory))
    tokens, usable = choose_tokens(run), usable_gib(run.gpu)
    longest, most = longest_sequence(config, lengths), most_tokens(config, run.plan, lengths)
    assert tokens is not None and usable is not None and longest <= tokens <= most

    def fits(number: int) -> bool:
        """Beside what is held, whatever sampling takes in its turn."""
        held, _, _ = beside_training(run)
        size = planned_pass(config, with_tokens(run, number).plan, lengths)
        training = sum(training_parts(run, size).values())
        return sum(held.values()) + training <= usable * GIB

    assert fits(tokens) or tokens == longest
    assert tokens == most or not fits(min(tokens + STEP, most))
    more = choose_tokens(replace(run, gpu=Gpu("GPU", 1.3 * memory)))
    assert more is not None and more >= tokens


def _with_tokens(folder: Path, gpu: Gpu | None, **keys: Any) -> Plan:
    (folder / "config.json").write_text(json.dumps(QWEN["0.5B"]))
    config = _on_gpu(name_or_path=str(folder), **{"per_device_train_batch_size": 1024, **keys})
    return with_tokens_per_pass(config, plan_of(config), LENGTHS, gpu)


def test_two_gpus_have_plans_of_their_own_whose_results_are_the_same(tmp_path: Path) -> None:
    """What differs is how a batch is divided, which no checkpoint and no later stage depends on."""
    large, small = (_with_tokens(tmp_path, named_gpu(name)) for name in ("H200", "H100"))
    assert large.max_tokens_per_pass and small.max_tokens_per_pass
    assert large.max_tokens_per_pass > small.max_tokens_per_pass
    one, two = (dataclasses.asdict(plan) for plan in (large, small))
    assert planned_values(one) == planned_values(two)
    assert read_plan(json.loads(json.dumps(one))) == large
    assert determining(_on_gpu()) == determining(_on_gpu(max_tokens_per_pass=5000))


@pytest.mark.parametrize("gpu", [None, Gpu("GPU of a pool")], ids=["a CPU", "memory not known"])
def test_without_a_gpu_s_memory_nothing_is_chosen(gpu: Gpu | None, tmp_path: Path) -> None:
    plan = _with_tokens(tmp_path, gpu)
    assert plan == plan_of(_on_gpu(per_device_train_batch_size=1024))
    assert plan.max_tokens_per_pass is None


def test_neither_is_it_for_a_model_whose_memory_is_not_forecast(tmp_path: Path) -> None:
    config = _on_gpu(name_or_path=str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert with_tokens_per_pass(config, plan_of(config), LENGTHS, named_gpu("H100")).max_tokens_per_pass is None


@pytest.mark.parametrize("gpu", [None, named_gpu("H100")], ids=["a CPU", "a GPU"])
def test_a_number_that_is_configured_is_taken_unless_a_sequence_is_longer(gpu: Gpu | None, tmp_path: Path) -> None:
    assert _with_tokens(tmp_path, gpu, max_tokens_per_pass=732).max_tokens_per_pass == 732
    with pytest.raises(ConfigError, match=r"pass = 731: a sequence may have 732 tokens, 220 of its prompt \(given\)"):
        _with_tokens(tmp_path, gpu, max_tokens_per_pass=731)


def test_a_gpu_is_too_small_only_if_the_longest_sequence_does_not_fit(tmp_path: Path) -> None:
    """Qwen2.5-0.5B takes 9.2 GiB with its gradients, moments and copies, and a pass of 732 tokens 2.5 GiB."""

    def found(memory: float, **keys: Any) -> dict[str, Any]:
        keys["engine"] = "vllm-server"  # elsewhere
        config = _on_gpu(name_or_path=str(tmp_path), per_device_train_batch_size=1024, **keys)
        plan = _with_tokens(tmp_path, Gpu("GPU", memory), **keys)
        return forecast(config, plan, LENGTHS, "not measured", [], Gpu("GPU", memory))["memory"]

    small, enough = found(10.0), found(14.0)
    assert small["tokens_per_pass"] == 732
    assert small["warning"] == "more than the 10.0 GiB of one GPU, with the longest sequence alone in a pass"
    changes = {key for remedy in small["remedies"] for key in remedy["changes"]}
    assert {"train.gradient_checkpointing", "train.offload"} & changes
    assert "warning" not in enough
    assert enough["peak_memory_gib"] <= 0.96 * 13 < 14.0
    given = found(14.0, max_tokens_per_pass=100_000)
    assert given["warning"] == "more than the 14.0 GiB of one GPU"
    assert given["remedies"][0]["changes"] == {"train.max_tokens_per_pass": enough["tokens_per_pass"]}


@pytest.mark.parametrize(("completion", "rows"), [(16_384, 32 * 16), (4096, 64 * 8)])
def test_what_sampling_takes_does_not_enlarge_passes_and_is_named_where_it_is_too_much(
    completion: int, rows: int
) -> None:
    """Keys and values of Qwen2.5-1.5B in bf16: 28 layers × 2 × 2 heads × 128 numbers, 28 KiB per token."""
    sizes = {"per_device_train_batch_size": rows // 8, "gradient_accumulation_steps": 8}
    config = _on_gpu(**sizes, max_completion_length=completion, engine="transformers")
    run, gpu = planned(config, "1.5B", LENGTHS, named_gpu("H100")), named_gpu("H100")
    tokens = choose_tokens(run)
    assert tokens is not None and gpu.memory_gib is not None
    told = peak_memory(with_tokens(run, tokens))
    parts = told["parts_gib"]
    assert parts["kv_cache"] == pytest.approx(rows * (completion + LENGTHS.longest) * 28 / 2**20)
    assert told["peak_memory_gib"] - parts["kv_cache"] < 40
    if told["peak_memory_gib"] > gpu.memory_gib:
        named = f"one H100, with the keys and values of {rows} completions sampled together by transformers"
        assert named in told["warning"]
    served = _on_gpu(**sizes, max_completion_length=completion, engine="recorded", recording="it")
    assert choose_tokens(planned(served, "1.5B", LENGTHS, gpu)) == tokens


def test_passes_of_an_update_follow_from_the_tokens_of_a_pass() -> None:
    """256 completions of 512 tokens of 32 prompts of 220: 138,112 tokens; of 100 tokens after 140: 30,080."""
    config = _on_gpu(per_device_train_batch_size=64, gradient_accumulation_steps=4)
    plan = replace(plan_of(config), max_tokens_per_pass=20_000)
    assert passes_per_update(config, plan, LENGTHS, 220, 512) == 7
    assert passes_per_update(config, plan, LENGTHS, 140, 100) == 2
    given = replace(plan_of(config), max_tokens_per_pass=100_000)  # more than 64 sequences have
    assert planned_pass(config, given, LENGTHS).tokens == 100_000
    # Without a limit, 64 sequences of the greatest length.
    assert most_tokens(config, plan, LENGTHS) == 64 * 732
    assert passes_per_update(config, plan_of(config), LENGTHS, 220, 512) == 3
    whole = _on_gpu(per_device_train_batch_size=256)
    assert most_tokens(whole, plan_of(whole), LENGTHS) == 138_112
    assert planned_pass(whole, plan_of(whole), LENGTHS).alone


def test_no_batch_of_full_length_needs_a_second_pass_where_one_is_planned() -> None:
    config = _on_gpu(per_device_train_batch_size=32)
    rows, tokens = torch.arange(32), most_tokens(config, plan_of(config), LENGTHS)
    lengths = torch.full_like(rows, 220), torch.full_like(rows, 512)
    sequences = Sequences(torch.zeros(32, 732, dtype=torch.int64), *lengths, rows // 8)
    assert len([*pack(sequences, tokens, share_prompts=True)]) == 1
    assert len([*pack(sequences, tokens - 1, share_prompts=True)]) == 2
