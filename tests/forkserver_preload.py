"""What `tests/forked.py` imports before it forks: vLLM and what its engine would import when it starts."""

import gc
import os

os.environ["TORCH_COMPILE_DISABLE"] = "1"  # vLLM would compile its counting of ranks, which nothing here reads

import peft  # noqa: F401
import transformers.models.qwen2.modeling_qwen2  # noqa: F401
import vllm.entrypoints.llm
import vllm.lora.model_manager
import vllm.model_executor.layers.fused_moe.fused_moe_method_base
import vllm.model_executor.models.qwen2
import vllm.model_executor.models.qwen3
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_worker  # noqa: F401

import grpo_core.rollout.vllm.colocated_engine
import grpo_core.training.loop  # noqa: F401

gc.collect()
gc.freeze()  # vLLM collects garbage several times when it starts: not through all these modules
