"""`[rollout]`: how completions are sampled, and by which engine."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo_core.config.base import LONGEST_SECONDS, Section
from grpo_core.config.vllm_args import SPECULATION, check_args
from grpo_core.system.addresses import holds_secret, is_web_address

VLLM_MIN_TEMPERATURE = 0.01  # vLLM raises lower temperatures to this


class RolloutConfig(Section):
    engine: Literal["auto", "vllm", "vllm-server", "transformers", "recorded"] = "auto"
    """What samples completions. `auto`: vLLM on a GPU, transformers on a CPU. `vllm-server`: vLLM in its own processes,
    on other GPUs or another machine. `recorded`: nothing is sampled; the training takes the completions of another run
    (`recording`), and the evaluation after it samples as with `auto`."""
    recording: str | None = None
    """recorded: directory of the run, finished or not, on whose completions to train, with the rewards that they got
    there."""
    num_generations: int = Field(8, ge=1)
    """G: completions sampled per prompt."""
    max_completion_length: int = Field(256, ge=1)
    """Tokens after which a completion is cut off; tokens of a conversation's environment count too."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; in training, log-probabilities are scaled by it too. At least 0.01 unless engine is
    `transformers`."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: the smallest set of tokens with at least this probability; 1 keeps all. The policy that is
    trained is the one that samples: ratio, loss and entropy are over the tokens that are left."""
    top_k: int = Field(0, ge=0)
    """Sample among this many most likely tokens; 0 keeps all. For the loss, see top_p."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample among the tokens that are at least this fraction as likely as the likeliest (arXiv:2407.01082); 0 keeps
    all. Before top_k and top_p. For the loss, see top_p."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Divides the positive logits of tokens that are in the prompt or the completion so far, and multiplies their
    negative ones (arXiv:1909.05858); 1 changes nothing. Samples then come from another policy than the trained one, and
    the sampling correction weights them: far from 1, few count. Not used in evaluations."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Texts that end a completion, in evaluations too. The completion includes their tokens, which are trained; rewards
    see what comes before the text. Such a completion does not count as cut off."""
    dynamic_sample: bool = False
    """Replace groups whose rewards are all equal with groups of fresh prompts (DAPO's dynamic sampling)."""
    max_resample_times: int = Field(3, ge=1)
    """dynamic_sample: rounds of replacement per generation batch; groups that are still without a signal then stay in
    it."""
    max_sync_drift: float | None = Field(None, gt=0)
    """Stop the training if, after a weight update of the engine, the mean difference between its and the trainer's
    log-probabilities of a fixed probe batch is above this. Default: 0.0001, in bf16 0.1, or three times the difference
    with the base's weights if that is more; and less if the engine does not follow the policy's movement."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Fraction of the GPU's memory that vLLM takes for its weights and KV cache. Default: 0.3 where the training uses
    the GPU too, 0.9 for servers with GPUs of their own."""
    cpu_kv_cache_gib: int = Field(1, ge=1)
    """Size of vLLM's KV cache on a CPU, in GiB."""
    vllm_server_base_urls: list[str] = Field(default_factory=list)
    """vllm-server: addresses of running servers, such as http://10.0.0.5:8000; default: a training starts its own."""
    vllm_num_servers: int = Field(1, ge=1)
    """vllm-server: servers that a training starts, on the GPUs after its own or on the CPU. With launch.launcher
    `slurm` or `kubernetes`: each on a further machine of the job."""
    vllm_tensor_parallel_size: int = Field(1, ge=1)
    """GPUs that share one copy of the model in vLLM: per server that a training starts; or, with vLLM in the training
    processes, that many of these sample together, and it has to divide train.num_processes."""
    vllm_data_parallel_size: int = Field(1, ge=1)
    """vllm-server: copies of the model per server that a training starts."""
    vllm_weight_transfer: Literal["auto", "nccl", "ipc", "shared_memory", "http"] = "auto"
    """vllm-server: how weights reach the servers that a training starts: between GPUs (nccl), on one GPU that trainer
    and server share (ipc), between CPUs of one machine (shared_memory) or of several (http). `auto`: nccl on a GPU;
    otherwise shared_memory, or http if the servers are on other machines."""
    vllm_server_timeout: float = Field(240.0, gt=0, le=LONGEST_SECONDS)
    """vllm-server: seconds without an available server after which the training stops, and that a server which a stage
    starts may take to start; also for a teacher's server."""
    vllm_request_timeout: float = Field(1800.0, gt=0, le=LONGEST_SECONDS)
    """vllm-server: seconds that a server may take to answer, or to take new weights, before it is left out; if it is
    the only one, or a teacher's, the training stops."""
    vllm_args: dict[str, Any] = Field(default_factory=dict)
    """Options passed to vLLM, by its names: `enforce_eager`, `disable_custom_all_reduce`, `enable_prefix_caching`,
    `max_num_batched_tokens`, `max_num_seqs`, and `speculative_config` for n-grams. Others are refused with the
    reason."""
    max_staleness: int = Field(0, ge=0, le=8)
    """vllm-server: above 0, the next generation batches are sampled while the current one is trained on, and sampling
    that is under way continues with new weights. A prompt's completions are trained at most this many generation
    batches after they began; the sampling correction accounts for the difference."""

    def engine_on(self, has_gpu: bool) -> Literal["vllm", "vllm-server", "transformers", "recorded"]:
        """The engine on a machine with or without a GPU: what `auto` means is decided here alone."""
        if self.engine == "auto":
            return "vllm" if has_gpu else "transformers"
        return self.engine

    @property
    def memory_share(self) -> float:
        """Fraction of the GPU's memory that vLLM takes: what the default means is decided here alone."""
        has_own_gpus = self.engine == "vllm-server" and self.vllm_weight_transfer != "ipc"
        return self.gpu_memory_utilization or (0.9 if has_own_gpus else 0.3)

    @property
    def in_evaluation(self) -> RolloutConfig:
        """The same for the stage evaluate, but 'auto' for 'recorded', since a recording does not answer its prompts."""
        return self.model_copy(update={"engine": "auto"}) if self.engine == "recorded" else self

    @property
    def may_share_processes(self) -> bool:
        """True if vLLM may sample in the training's own processes: the engine is vLLM, or may turn out to be."""
        return self.in_evaluation.engine in ("auto", "vllm")

    @property
    def speculation(self) -> dict[str, Any] | None:
        """How vLLM guesses tokens before it computes them (vLLM's speculative_config); None if it does not."""
        return self.vllm_args.get(SPECULATION)

    @property
    def starts_servers(self) -> bool:
        """True if a training starts vLLM servers of its own."""
        return self.engine == "vllm-server" and not self.vllm_server_base_urls

    @property
    def server_gpus(self) -> int:
        """GPUs of the vLLM servers that a training starts, besides the training's own."""
        if not self.starts_servers or self.vllm_weight_transfer == "ipc":
            return 0
        return self.vllm_num_servers * self.vllm_tensor_parallel_size * self.vllm_data_parallel_size

    @model_validator(mode="after")
    def _temperature_can_be_sampled(self) -> RolloutConfig:
        if self.temperature < VLLM_MIN_TEMPERATURE and self.engine not in ("transformers", "recorded"):
            raise ValueError(
                f"temperature={self.temperature:g} with engine={self.engine!r}: vLLM samples at "
                f"{VLLM_MIN_TEMPERATURE:g} if it is given less; set temperature to {VLLM_MIN_TEMPERATURE:g} or "
                "more, or engine to 'transformers'"
            )
        return self

    @model_validator(mode="after")
    def _args_are_safe(self) -> RolloutConfig:
        check_args(self.vllm_args)
        if self.vllm_args and self.engine in ("transformers", "recorded"):
            raise ValueError(f"vllm_args={self.vllm_args} with engine={self.engine!r}, which is not vLLM: remove them")
        if self.speculation and (self.min_p or self.max_staleness):
            raise ValueError(
                f"vllm_args.speculative_config with min_p={self.min_p:g} and max_staleness={self.max_staleness}: vLLM "
                "ignores min_p when it speculates, and sampling ahead with speculation has not been run here; set both "
                "to 0, or remove speculative_config"
            )
        return self

    @model_validator(mode="after")
    def _recording_is_named(self) -> RolloutConfig:
        if (self.engine == "recorded") != (self.recording is not None):
            raise ValueError(
                f"recording={self.recording!r} with engine={self.engine!r}: only the engine 'recorded' trains on a "
                "recording, and it needs one; set both, or neither"
            )
        if self.engine == "recorded" and self.dynamic_sample:
            raise ValueError(
                "dynamic_sample=true with engine='recorded': nothing is sampled, so no group can be replaced; remove "
                "dynamic_sample (a recording made with it has the groups that were trained)"
            )
        return self

    @model_validator(mode="after")
    def _servers_are_asked(self) -> RolloutConfig:
        if any(map(holds_secret, self.vllm_server_base_urls)):
            raise ValueError(
                "vllm_server_base_urls contains a user, password or token, which would be recorded: leave it out; "
                "servers started by `python -m grpo_core.rollout.vllm.serve` ask for the secret in GRPO_VLLM_SECRET"
            )
        if self.engine == "vllm-server":
            wrong = [url for url in self.vllm_server_base_urls if not is_web_address(url)]
            if wrong:
                raise ValueError(f"vllm_server_base_urls: {wrong[0]!r} is not an address such as http://127.0.0.1:8000")
            if len(set(self.vllm_server_base_urls)) < len(self.vllm_server_base_urls):
                raise ValueError(f"vllm_server_base_urls={self.vllm_server_base_urls} names a server twice")
            each = self.vllm_tensor_parallel_size, self.vllm_data_parallel_size
            if self.vllm_weight_transfer == "ipc" and (self.vllm_num_servers, *each) != (1, 1, 1):
                raise ValueError(
                    "vllm_weight_transfer='ipc' is for one server on one GPU, the training's own; "
                    f"vllm_num_servers={self.vllm_num_servers}, vllm_tensor_parallel_size={each[0]} and "
                    f"vllm_data_parallel_size={each[1]} have to be 1, or the transfer 'nccl'"
                )
        elif self.vllm_server_base_urls or self.max_staleness:
            raise ValueError(
                f"vllm_server_base_urls={self.vllm_server_base_urls} and max_staleness={self.max_staleness} are for "
                f"engine='vllm-server', which can sample while the policy is trained; engine is {self.engine!r}"
            )
        return self
