"""`rollout.vllm_args`: the options of vLLM that may be passed through, and why others may not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_core.config.run import RunConfig

FLAGS = {"enforce_eager": True, "disable_custom_all_reduce": True, "enable_prefix_caching": False}  # not the default
COUNTS = ("max_num_batched_tokens", "max_num_seqs")
SPECULATION = "speculative_config"
ALLOWED = sorted([*FLAGS, *COUNTS, SPECULATION])
# Tokens speculated on at most unless both COUNTS are given: vLLM's smallest defaults are 2,048 tokens of 256 requests.
MOST_DRAFTS = 7

UNTRIED = "it has not been run here against the trainer's log-probabilities"
REFUSED = {
    **dict.fromkeys(("kv_cache_dtype", "calculate_kv_scales"), f"no 8-bit KV cache: {UNTRIED}"),
    **dict.fromkeys(("quantization", "load_format"), f"no quantised weights in vLLM: {UNTRIED}"),
    "enable_chunked_prefill": "the processor decides it: chunks would make samples on a CPU depend on others",
    "gpu_memory_utilization": "set rollout.gpu_memory_utilization",
    "tensor_parallel_size": "set rollout.vllm_tensor_parallel_size",
    "data_parallel_size": "set rollout.vllm_data_parallel_size",
    "dtype": "it follows train.mixed_precision, so that both sides compute alike",
    "max_model_len": "it follows the longest prompt and rollout.max_completion_length",
    "seed": "each completion has a seed of its own; set seed",
    "trust_remote_code": "code of a model's repository is not run",
    **dict.fromkeys(("model", "tokenizer", "revision"), "set the keys of [model]"),
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank"), "it follows model.use_peft and model.lora_r"),
    **dict.fromkeys(("logprobs_mode", "hf_overrides"), "log-probabilities would not be comparable with the trainer's"),
    **dict.fromkeys(("enable_sleep_mode", "scheduling_policy"), "the engine decides it"),
}


def check_args(args: Mapping[str, Any]) -> None:
    """Raises ValueError unless each option is allowed and has a value that is known to be safe."""
    for name, value in args.items():
        if name not in ALLOWED:
            why = REFUSED.get(name, f"it is not known to be safe; allowed are {', '.join(ALLOWED)}")
            raise ValueError(f"vllm_args: {name}={json.dumps(value, default=str)} is not passed to vLLM: {why}")
        if name in FLAGS and value is not FLAGS[name]:
            wanted = json.dumps(FLAGS[name])
            raise ValueError(f"vllm_args: {name}={json.dumps(value, default=str)} has to be {wanted}, or left out")
        if name in COUNTS and not _is_count(value):
            raise ValueError(f"vllm_args: {name}={value!r} is not a whole number above 0")
    if SPECULATION in args:
        _check_ngrams(args)


def _check_ngrams(args: Mapping[str, Any]) -> None:
    given = args[SPECULATION]
    counts = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
    if not isinstance(given, dict) or given.get("method") != "ngram":
        raise ValueError(
            f"vllm_args: speculative_config={given!r}: only method='ngram' is passed to vLLM; suffix decoding and "
            f"draft models have not been run here. Give method, {', '.join(counts)}"
        )
    for name in counts:
        if not _is_count(given.get(name)):
            raise ValueError(f"vllm_args: speculative_config.{name}={given.get(name)!r} is not a whole number above 0")
    if others := sorted(given.keys() - {"method", *counts}):
        raise ValueError(f"vllm_args: speculative_config.{others[0]} is not passed to vLLM; leave it out")
    drafts, longest, shortest = (given[name] for name in counts)
    if shortest > longest:
        raise ValueError(f"vllm_args: prompt_lookup_min={shortest} is above prompt_lookup_max={longest}")
    tokens, sequences = (args.get(name) for name in COUNTS)
    if tokens is None and sequences is None:
        fits = drafts <= MOST_DRAFTS
    else:
        fits = tokens is not None and sequences is not None and (1 + drafts) * sequences <= tokens
    if not fits:
        raise ValueError(
            f"vllm_args: num_speculative_tokens={drafts} with max_num_batched_tokens={tokens} and "
            f"max_num_seqs={sequences}: where a step has no room for all drafts, samples depend on what is sampled "
            f"beside them; give both, with max_num_batched_tokens at least {1 + drafts} · max_num_seqs, or neither and "
            f"at most {MOST_DRAFTS} tokens"
        )


def check_speculation(config: RunConfig) -> None:
    """Raises ValueError if other keys cannot be combined with vLLM's speculation."""
    if not config.rollout.speculation:
        return
    if config.algorithm.routing_replay:
        raise ValueError(
            "algorithm.routing_replay=true with rollout.vllm_args.speculative_config: the experts of guessed "
            "tokens are not told from those of sampled ones; set one of the two to its default"
        )
    for name, keys in {"rollout": config.rollout, "evaluation": config.evaluation}.items():
        if keys.top_k and keys.top_p == 1:
            raise ValueError(
                f"{name}.top_k={keys.top_k} with {name}.top_p=1 and rollout.vllm_args.speculative_config: on a CPU "
                "vLLM 0.32 fails in a step without guesses; set top_p below 1, or top_k to 0"
            )


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value < 2**31
