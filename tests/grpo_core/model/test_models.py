"""Architectures that do something of their own: log-probabilities and gradients are those of rows that go through
transformers' eager attention one by one, without padding and without anything of ours."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_core.errors import ConfigError, EngineError
from grpo_core.model.capabilities import check_padding
from grpo_core.model.loading import load_model
from grpo_core.model.packed_rows import Gather
from grpo_core.model.policy import Policy
from grpo_core.model.pretrained import check_context
from grpo_core.model.sequences import Sequences
from grpo_core.rollout.transformers_engine import TransformersEngine
from grpo_core.rollout.types import Request, Sampling
from grpo_core.training.session import load_session
from tests.conftest import make_model, make_run, with_keys
from tests.grpo_core.model.exactness import distance
from tests.grpo_core.rollout.sampling import sampled

TEMPERATURE = 0.7
LENGTHS = [(3, 5), (3, 9), (8, 1), (5, 12)]  # of prompt and completion
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 2,
}

# Architecture, changes of its configuration, whether the model itself has to make the logits, whether it takes lines.
MODELS: dict[str, tuple[str, dict[str, Any], bool, bool]] = {
    "capped attention": ("Gemma2", {"head_dim": 32, "attn_logit_softcapping": 1.0}, True, False),
    "scaled logits": ("Granite", {"logits_scaling": 0.5, "attention_multiplier": 0.2}, True, False),
    "head with a bias": ("Phi", {}, True, False),
    "dropout": ("OPT", {"word_embed_proj_dim": 64, "ffn_dim": 64, "dropout": 0.5, "init_std": 0.2}, False, True),
    "chunks": (
        "Llama4Text",
        {"intermediate_size_mlp": 64, "num_local_experts": 2, "head_dim": 32, "attention_chunk_size": 4},
        False,
        False,
    ),
    "narrow window": ("Mistral", {"sliding_window": 4}, False, False),
    "window of the longest": ("Mistral", {"sliding_window": 17}, False, True),
    "experts": ("Qwen3Moe", {**EXPERTS, "head_dim": 32}, False, True),
}
ZAMBA2 = {"n_mamba_heads": 4, "mamba_headdim": 32, "mamba_d_state": 8, "mamba_ngroups": 1, "chunk_size": 8}
ZAMBA2 |= {
    "hybrid_layer_ids": [1],
    "layer_types": ["linear_attention", "hybrid"],
    "num_mem_blocks": 1,
    "adapter_rank": 4,
}
# Those that the transformers engine refuses, and those that transformers would recompute wrongly or not at all.
TRAINED: dict[str, tuple[str, dict[str, Any], bool, bool]] = {
    "layers in layers": ("Zamba2", ZAMBA2 | {"num_attention_heads": 4, "num_key_value_heads": 4}, False, True),
    "no recomputing by itself": (
        "JetMoe",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16, "num_key_value_heads": 2},
        False,
        True,
    ),
    "head called decoder": (
        "ModernBertDecoder",
        {
            "layer_types": ["full_attention"] * 2,
            "num_key_value_heads": 2,
            "bos_token_id": 0,
            "cls_token_id": 0,
            "sep_token_id": 0,
        },
        True,
        False,
    ),
    "dropout from the configuration": (
        "Falcon",
        {"hidden_dropout": 0.5, "attention_dropout": 0.5, "new_decoder_architecture": True, "num_kv_heads": 1},
        False,
        False,
    ),
}
ALL_MODELS = pytest.mark.parametrize("folder", MODELS, indirect=True)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of the table, made once."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            architecture, changes, *_ = (MODELS | TRAINED)[name]
            made[name] = make_model(tmp_path_factory.mktemp("model"), architecture, **changes)
        return made[name]

    return of


@pytest.fixture
def folder(request: pytest.FixtureRequest, make: Callable[[str], Path]) -> Path:
    return make(request.param)


def _max_length() -> int:
    return max(prompt + completion for prompt, completion in LENGTHS)


def _sequences() -> Sequences:
    torch.manual_seed(0)
    rows = [torch.randint(3, 13, (prompt + completion,)) for prompt, completion in LENGTHS]
    prompts, completions = torch.tensor(LENGTHS).unbind(1)
    return Sequences(
        torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), prompts, completions, torch.arange(len(rows))
    )


def _bare_rows(folder: Path, sequences: Sequences, temperature: float) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Log-probabilities and entropies of the completion tokens, and the gradient of `_figure` of them, by parameter."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    logprobs = torch.zeros(len(sequences.input_ids), int(sequences.completion_lengths.max()))
    entropy = torch.zeros_like(logprobs)
    for row, (prompt, completion) in enumerate(LENGTHS):
        ids = sequences.input_ids[row, : prompt + completion]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, prompt - 1 : -1]
        log_p = (logits / temperature).log_softmax(-1)
        logprobs[row, :completion] = log_p.gather(1, ids[prompt:, None]).squeeze(1)
        entropy[row, :completion] = torch.distributions.Categorical(logits=log_p).entropy()
    _figure(logprobs, entropy).backward()
    return logprobs.detach(), entropy.detach(), _gradient(model)


def _figure(logprobs: Tensor, entropy: Tensor) -> Tensor:
    """A sum in which each token has a weight of its own."""
    weights = torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)
    return (weights * logprobs + weights.flip(1) * entropy).sum()


def _gradient(model: Any) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("folder", MODELS | TRAINED, indirect=True)
@pytest.mark.parametrize("gradient_checkpointing", [False, True], ids=["kept", "recomputed"])
def test_log_probabilities_and_gradient_are_those_of_bare_rows(
    folder: Path, gradient_checkpointing: bool, request: pytest.FixtureRequest
) -> None:
    _, _, makes_logits, packs = (MODELS | TRAINED)[request.node.callspec.params["folder"]]
    policy = Policy(
        load_model(folder), TEMPERATURE, max_length=_max_length(), gradient_checkpointing=gradient_checkpointing
    )
    assert (policy.output_layer is None, policy.packs) == (makes_logits, packs)
    sequences = _sequences()
    logprobs, entropy = policy(policy.prepare(sequences), entropy_gradient=True)
    _figure(logprobs, entropy).backward()
    expected_logprobs, expected_entropy, expected_gradient = _bare_rows(folder, sequences, TEMPERATURE)
    assert torch.allclose(logprobs, expected_logprobs, atol=1e-5)
    assert torch.allclose(entropy, expected_entropy, atol=1e-5)
    assert distance(_gradient(policy.model), expected_gradient) < 1e-5


@pytest.mark.slow
@ALL_MODELS
def test_the_transformers_engine_samples_with_the_probabilities_of_bare_rows(
    folder: Path, request: pytest.FixtureRequest
) -> None:
    *_, packs = MODELS[request.node.callspec.params["folder"]]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine = TransformersEngine(load_model(folder), tokenizer, _max_length())
    assert engine.shares_cache >= packs
    prompts = [[3, 5, 4], [6, 3, 3, 9, 4]]
    completions = sampled(
        engine.generate([Request(ids, 3, 7 + row) for row, ids in enumerate(prompts)], Sampling(12, TEMPERATURE))
    )
    bare = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for prompt, completion in zip([prompts[0]] * 3 + [prompts[1]] * 3, completions, strict=True):
        with torch.no_grad():
            logits = bare(torch.tensor([prompt + completion.ids])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / TEMPERATURE).log_softmax(-1)[range(len(completion.ids)), completion.ids]
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_window_is_one_only_where_a_sequence_may_be_longer(tmp_path: Path) -> None:
    """This includes a window that no short probe would fill."""
    folder = make_model(tmp_path, "Mistral", sliding_window=120, max_position_embeddings=256)
    for max_length in (120, 121):
        assert Policy(load_model(folder), 1.0, max_length=max_length).packs == (max_length == 120)
        engine = TransformersEngine(load_model(folder), AutoTokenizer.from_pretrained(folder), max_length)
        assert engine.shares_cache == (max_length == 120)


def test_rounding_alone_keeps_no_model_of_experts_from_lines_and_the_shared_cache(tmp_path: Path) -> None:
    """In bfloat16, rounding may send a token to another expert, although attention is the same."""
    changes = {"num_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 16}
    policy = Policy(load_model(make_model(tmp_path, "Olmoe", **changes)), 1.0, bf16=True)
    assert policy.packs
    assert TransformersEngine(policy.model, AutoTokenizer.from_pretrained(tmp_path)).shares_cache
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.bfloat16}


def test_a_training_in_which_padding_changes_a_row_is_refused(values: dict[str, Any], tmp_path: Path) -> None:
    """Sparse attention of DeepSeek V3.2 chooses other keys where scores are equal and the row is longer."""
    sparse = {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 16, "n_shared_experts": 1}
    values["model"]["name_or_path"] = str(make_model(tmp_path / "model", "DeepseekV32", **LATENT, **sparse))
    run = make_run(tmp_path / "run", with_keys(values, max_completion_length=40))
    with pytest.raises(ConfigError, match=r"DeepseekV32ForCausalLM .* padded .* attend to \(index_topk = 8\)"):
        load_session(run)
    check_padding(load_model(tmp_path / "model"), max_length=8)


# Attention to the keys of some blocks: the layers' name for their number, the configuration's, and the rest of it.
IN_BLOCKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "DeepseekV4": (  # blocks of 4 tokens
        "index_topk",
        "index_topk",
        {
            "head_dim": 32,
            "qk_rope_head_dim": 8,
            "q_lora_rank": 16,
            "o_lora_rank": 16,
            "o_groups": 2,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "index_n_heads": 2,
            "index_head_dim": 16,
        },
    ),
    "MiniMaxM3VLText": (
        "topk_blocks",
        "index_topk_blocks",
        {
            "head_dim": 32,
            "rotary_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "dense_intermediate_size": 64,
            "shared_intermediate_size": 64,
            "layer_types": ["minimax_m3_sparse"] * 4,
            "index_n_heads": 2,
            "index_head_dim": 32,
            "index_block_size": 4,
        },
    ),
    "Qwen4ExpText": (  # tokens, in blocks of 4
        "token_budget",
        "indexer_budget",
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "hc_lowrank": 16,
            "layer_types": ["full_attention"] * 4,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 32,
            "indexer_compress_ratio": 4,
        },
    ),
}


def _in_blocks(folder: Path, architecture: str, topk: int) -> Any:
    _, key, sizes = IN_BLOCKS[architecture]
    return load_model(
        make_model(folder, architecture, **sizes, num_hidden_layers=4, max_position_embeddings=4096, **{key: topk})
    )


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["DeepseekV4", "MiniMaxM3VLText"])
@pytest.mark.parametrize(
    ("topk", "within", "longest"), [(48, 150, 300), (250, 100, 2000)], ids=["as it is", "shortened"]
)
def test_sparse_attention_by_blocks_is_refused_where_sequences_have_more_blocks(
    tmp_path: Path, architecture: str, topk: int, within: int, longest: int
) -> None:
    """They keep so many blocks of 4 tokens: the run's longest sequence decides."""
    model, (name, key, _) = _in_blocks(tmp_path, architecture, topk), IN_BLOCKS[architecture]
    check_padding(model, max_length=within)
    with pytest.raises(ConfigError, match=rf"padded .*{key} = {topk}"):
        check_padding(model, max_length=longest)
    assert {getattr(each, name) for each in model.modules() if hasattr(each, name)} == {topk}


@pytest.mark.slow
@pytest.mark.parametrize("longest", [150, 2000], ids=["as it is", "shortened"])
def test_sparse_attention_that_chooses_among_a_token_s_own_blocks_is_trained(tmp_path: Path, longest: int) -> None:
    """Qwen 4 counts no block that begins after the token, so padding behind a row changes nothing in it, though blocks
    are left out of these sequences."""
    model = _in_blocks(tmp_path / "sparse", "Qwen4ExpText", 48)
    every = _in_blocks(tmp_path / "all", "Qwen4ExpText", 4096)
    ids = torch.randint(13, (1, 150))
    with torch.no_grad():
        assert distance([model(ids, use_cache=False).logits], [every(ids, use_cache=False).logits]) > 0.1
    check_padding(model, max_length=longest)
    assert {each.token_budget for each in model.modules() if hasattr(each, "token_budget")} == {48}


@pytest.mark.slow
def test_queries_scaled_by_their_position_are_not_sampled_with_padding_before_a_prompt(tmp_path: Path) -> None:
    """Llama 4 scales after `floor_scale` tokens, and transformers counts padding among them: too short a probe sees
    nothing."""
    llama4 = {"intermediate_size_mlp": 64, "num_local_experts": 2, "head_dim": 32, "attention_chunk_size": 16}
    llama4 |= {"num_hidden_layers": 4, "floor_scale": 2000, "attn_scale": 5.0, "max_position_embeddings": 8192}
    model = load_model(make_model(tmp_path, "Llama4Text", **llama4))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert not TransformersEngine(model, tokenizer, 1000).shares_cache
    with pytest.raises(EngineError, match=r"logits differ from a plain pass's .* 'vllm'"):
        TransformersEngine(model, tokenizer, 8000)


def test_packed_passes_with_other_gradients_give_way_to_padded_rows(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states are right: no comparison of them would show it. Nor would short sequences."""
    backward = Gather.backward

    def doubled(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return backward(ctx, gradient)[0] * (2 if len(gradient) > 50 else 1), None

    monkeypatch.setattr(Gather, "backward", doubled)
    for model, packs in ((load_model(model_folder), False), (load_model(model_folder).requires_grad_(False), True)):
        policy = Policy(model, 1.0, max_length=60)
        assert policy.packs == packs
        assert policy.why_not.startswith("gradients differ by") != packs


@pytest.mark.slow
@pytest.mark.parametrize("from_the_start", [True, False])
@pytest.mark.parametrize("beyond", [0, 50, 500])
def test_layers_that_do_not_give_the_same_twice_cannot_be_recomputed(
    tmp_path: Path, from_the_start: bool, beyond: int
) -> None:
    """Nor after memory has run out, when a training recomputes as its last resort; also if only the run's longest
    sequences show it."""
    model = load_model(make_model(tmp_path, max_position_embeddings=1024))
    mlp, calls = model.model.layers[0].mlp, itertools.count(1)
    forward = mlp.forward
    longest = 60 if beyond < 60 else 1000
    policy = Policy(model, 1.0, max_length=longest)
    mlp.forward = lambda x: forward(x) * (1 + next(calls) % 2 * (x.shape[1] > beyond))
    with pytest.raises(ConfigError, match=r"other gradients when activations are computed again, by \d+%"):
        if from_the_start:
            Policy(model, 1.0, max_length=longest, gradient_checkpointing=True)
        else:
            policy.recompute(1)


def test_recomputing_is_tried_on_as_many_tokens_as_there_is_memory_for(model_folder: Path) -> None:
    """It is a training's last resort when memory has run out."""
    policy, tried, room = Policy(load_model(model_folder), 1.0, max_length=60), list[tuple[int, int]](), 20
    states = policy.hidden_states

    def with_little_memory(tokens: Any) -> Tensor:
        tried.append((tokens.input_ids.numel(), policy.recomputed))
        if tried[-1][0] > room and not policy.recomputed:
            raise torch.OutOfMemoryError
        return states(tokens)

    policy.hidden_states = with_little_memory  # type: ignore[method-assign]
    policy.recompute(2)
    assert tried == [(59, 0)] * 4 + [(31, 0), (15, 0), (15, 2)]
    assert policy.recomputed == 2
    policy.recomputed = room = 0
    with pytest.raises(torch.OutOfMemoryError):
        policy.recompute(2)


ROPE = {
    "dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, 64),
    "longrope": (
        "Phi3",
        {
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 16,
                "long_factor": [4.0] * 16,
            },
        },
        16,
    ),
    "yarn": ("Llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, None),
}


@pytest.mark.parametrize("kind", ROPE)
def test_sequences_are_as_long_as_frequencies_stay_the_same(kind: str, tmp_path: Path) -> None:
    """Up to the bound a row does not depend on what shares its pass; beyond it does, and a run is refused."""
    architecture, changes, bound = ROPE[kind]
    model = load_model(make_model(tmp_path, architecture, **changes))

    def change(length: int) -> float:
        """How far the first ten tokens of a pass are from a pass of their own when a row of `length` shares it."""
        ids = torch.arange(length)[None].remainder(13)
        with torch.no_grad():
            together, alone = (model(input_ids=x, use_cache=False).logits[:, :10] for x in (ids, ids[:, :10]))
        return float((together - alone).abs().max())

    if bound is None:
        assert change(64) < 1e-4
        check_context(model.config, 64)
        return
    assert change(bound) < 1e-4 < 1e-2 < change(bound + 1)
    check_context(model.config, bound)
    with pytest.raises(ConfigError, match=rf"has {bound + 1} tokens, and the model takes {bound} .*frequencies change"):
        check_context(model.config, bound + 1)
