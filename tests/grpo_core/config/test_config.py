"""Configuration: every mistake is named with a way out, and what is written is what was read."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.config.files import describe_keys, dump_config, load_config, parse_config
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.toml"))
VALUES: dict[str, Any] = {
    "name": "x",
    "model": {"name_or_path": "m"},
    "data": {"train": "a", "eval": "b"},
    "rewards": [{"function": "exact_match"}],
}


NUMBERS = [
    key.replace("rewards.", "rewards.0.")
    for key, _, accepts, _ in describe_keys()
    if accepts.startswith(("number", "integer"))
    and not key.startswith(("evaluation.sets", "promotion.guards", "data.sources"))
]


def with_key(key: str, value: Any) -> dict[str, Any]:
    """VALUES with one key set."""
    values = copy.deepcopy(VALUES)
    *sections, last = key.split(".")
    part: Any = values
    for section in sections:
        part = part[int(section)] if isinstance(part, list) else part.setdefault(section, {})
    part[last] = value
    return values


NGRAMS = "; ".join(
    f"rollout.vllm_args.speculative_config.{each}"
    for each in ("method='ngram'", "num_speculative_tokens=4", "prompt_lookup_max=3", "prompt_lookup_min=1")
)

# TOML, and what the message has to name: the key, the value, the way out.
REFUSED = [
    ("data={trian='a', eval='b'}", "data.trian: unknown key; did you mean 'train'?"),
    ("data.eval='b'", "data: train is missing; name prompts in train and eval, or several"),
    ("train.learning_rte=1", "train.learning_rte: unknown key; did you mean 'learning_rate'?"),
    ("rewards=[{function='f', wieght=2}]", "rewards.0.wieght: unknown key; did you mean 'weight'?"),
    ("algorithm.epsilon=-1", "algorithm.epsilon = -1: Input should be greater than or equal to 0"),
    ("rollout.num_generations=0", "rollout.num_generations = 0: Input should be greater than or equal to 1"),
    ("algorithm.loss_type='ppo'", "algorithm.loss_type = 'ppo': Input should be 'grpo', 'bnpo'"),
    ("algorithm.loss_type='cispo'", "set it (ScaleRL: 5.0)"),
    ("algorithm.loss_type='luspo'", "set importance_sampling_level='sequence'"),
    (
        "algorithm={loss_type='vespo', vllm_importance_sampling_mode='sequence_mask'}",
        "use 'token_truncate' or 'token_mask'",
    ),
    ("algorithm={loss_type='vespo', importance_sampling_level='sequence'}", "makes its own sequence weight"),
    ("algorithm={loss_type='sapo', delta=2}", "remove delta"),
    ("algorithm={delta=1.25, epsilon_high=0.28}", "delta=1.25 must be above 1 + epsilon_high = 1.28"),
    ("algorithm={multi_objective_aggregation='normalize_then_sum', scale_rewards='none'}", "normalises in its own way"),
    ("algorithm.sync_ref_model=true", "no reference policy to move while beta=0"),
    ("algorithm.vllm_importance_sampling_clip_min=4", "clip_min=4 is above vllm_importance_sampling_clip_max=3"),
    ("algorithm.entropy_coef_min=2", "entropy_coef_min=2 is above entropy_coef_max=1"),
    ("algorithm={sync_ref_model=true, beta=1}; model.use_peft=true", "the base model under the adapter"),
    ("model.lora_dropout=0.1", "lora_dropout=0.1 is for an adapter; set use_peft = true"),
    ("model.adapter='a'", "adapter='a' is for an adapter; set use_peft = true"),
    (
        "model.lora_modules_to_save=['lm_head']",
        "lora_modules_to_save=['lm_head'] is for an adapter; set use_peft = true",
    ),
    (
        "model.use_peft=true; model.lora_modules_to_save=['lm_head']; train={sharding='full', num_processes=2}",
        "lora_modules_to_save=['lm_head'] with train.sharding='full'",
    ),
    ("train.early_stopping_patience=2", "early_stopping_patience=2 needs evaluations during training"),
    ("train.load_best_model_at_end=true", "set eval_steps"),
    ("train.metric_for_best_model='eval_loss'", "Input should be 'eval_reward' or 'eval_accuracy'"),
    ("health.kl_action='roll back'", "Input should be 'warn', 'stop' or 'roll_back'"),
    ("train={steps_per_generation=2, generation_batch_size=8}", "are both given"),
    ("train={num_processes=8, num_machines=3}", "cannot be divided equally among num_machines=3"),
    ("train={num_processes=2, num_machines=2}", "set launch.launcher to 'slurm', or to 'ssh'"),
    (
        "train={num_processes=2, num_machines=2}; launch={launcher='ssh', hosts=['a']}",
        "hosts=['a']: name at least as many",
    ),
    ("launch.hosts=['a', 'b', 'me@a']", "names a machine twice"),
    ("launch.hosts=['-oProxyCommand=sh']", "launch.hosts.0 = '-oProxyCommand=sh': String should match"),
    (
        "launch={launcher='ssh', hosts=['a']}; rollout.engine='vllm-server'",
        "name machines for them in launch.server_hosts",
    ),
    ("launch.launcher='kubernetes'", "launch.kubernetes; name a YAML file with a Job"),
    (
        "train={num_processes=4, num_machines=2}; launch={launcher='ssh', hosts=['a', 'b']}; "
        "rollout.vllm_tensor_parallel_size=4",
        "num_processes=4 / train.num_machines=2 is not a multiple of it",
    ),
    ("train={lr_scheduler_type='constant', warmup_steps=5}", "use 'constant_with_warmup'"),
    ("train.learning_rate=inf", "train.learning_rate = inf: Input should be a finite number"),
    ("rewards=[{function='length', weight=nan}]", "rewards.0.weight = nan"),
    ("rewards=[]", "rewards = []"),
    ("rewards=[{function='length', timeout=1e+300}]", "rewards.0.timeout = 1e+300: Input should be less"),
    ("rewards=[{function='length', memory_gib=1e+300}]", "rewards.0.memory_gib = 1e+300: Input should be"),
    ("environment.memory_gib=1e+300", "environment.memory_gib = 1e+300: Input should be less"),
    (
        "rollout={engine='vllm-server', vllm_server_base_urls=['http://me:hidden@a']}",
        "base_urls contains a user, password or token",
    ),
    ("rollout.vllm_server_base_urls=['http://me:hidden@a']", "base_urls contains a user, password or token"),
    ("rewards=[{function='length'}, {function='mine:length'}]", "give those of the same function a `name`"),
    ("rewards=[{function='length', name='a/b'}]", "rewards.0.name = 'a/b'"),
    ("rewards=[{function='length', clip=[1, 0]}]", "clip=[1.0, 0.0] is empty"),
    ("rewards=[{function='length', range=[-1e+155, 1e+155]}]", "is wider than 1e+12, which bounds nothing"),
    ("rewards=[{function='length', normalize=true}]", "set clip = [lowest, highest]"),
    ("rewards=[{function='length', gate='form'}]", "rewards.0.gate='form' is not among the rewards"),
    ("rewards=[{function='length', gate='length'}]", "gate='length' is the reward itself"),
    ("rewards=[{function='length', gate_threshold=2}]", "gate_threshold=2 without a gate"),
    ("evaluation.accuracy_reward='other'", "'other' is not among the rewards"),
    ("evaluation.num_samples=4", "set a temperature, such as 0.7, or num_samples=1"),
    ("evaluation.answer_pattern='('", "not a regular expression"),
    ("evaluation.answer_pattern='answer: .+'", "put one in parentheses"),
    ("evaluation.sets=[{name='held-out', data='x'}]", "share a name"),
    ("train={eval_steps=5, load_best_model_at_end=true}", "load_best_model_at_end=true with promotion.set='held-out'"),
    (
        "train={eval_steps=5, load_best_model_at_end=true}; data={train='t', eval='e'}; promotion.set='final'; "
        "evaluation.sets=[{name='final', data='e'}]",
        "with promotion.set='final': the training chooses its model on data.eval, which is that set",
    ),
    ("promotion.set='hard'", "promotion.set='hard' is not among the evaluation sets ['held-out']"),
    ("promotion.guards=[{metric='rewards/tone/mean', min=0}]", "guards.0.metric='rewards/tone/mean'"),
    ("promotion.guards=[{metric='kl'}]", "bounds nothing; give max_drop, max_rise, min or max"),
    ("rollout.engine='recorded'", "recording=None with engine='recorded'"),
    ("rollout.recording='storage/runs/a'", "recording='storage/runs/a' with engine='auto'"),
    ("rollout={engine='recorded', recording='a', dynamic_sample=true}", "remove dynamic_sample"),
    (
        "rollout={engine='recorded', recording='a'}; train.eval_steps=5",
        "train.eval_steps=5 with rollout.engine='recorded'",
    ),
    ("rollout.max_staleness=1", "are for engine='vllm-server'"),
    ("rollout={engine='vllm-server', max_staleness=9}", "rollout.max_staleness = 9: Input should be less"),
    ("rollout={engine='vllm-server', vllm_server_base_urls=['10.0.0.5:8000']}", "not an address such as http://127"),
    ("rollout={engine='vllm-server', vllm_server_base_urls=['http://a:port']}", "not an address such as http://127"),
    ("rollout={engine='vllm-server', vllm_server_base_urls=['http://a', 'http://a']}", "names a server twice"),
    (
        "rollout={engine='vllm-server', vllm_weight_transfer='ipc', vllm_tensor_parallel_size=2}",
        "vllm_num_servers=1, vllm_tensor_parallel_size=2",
    ),
    (
        "rollout={engine='vllm-server', max_staleness=1}; algorithm.vllm_importance_sampling_correction=false",
        "algorithm.vllm_importance_sampling_correction has to be true",
    ),
    ("health.log_ratio_action='lower_staleness'", "log_ratio_action='lower_staleness' with rollout.max_staleness=0"),
    (
        "rollout.repetition_penalty=1.1; algorithm.vllm_importance_sampling_correction=false",
        "algorithm.vllm_importance_sampling_correction has to be true",
    ),
    ("rollout.stop=['']", "rollout.stop.0 = '': String should have at least 1 character"),
    ("rollout.stop=['x']; environment.tools=['calculator']", "rollout.stop=['x'] with an environment or tools"),
    ("name='../up'", "name = '../up'"),
    ("train.max_steps=1000000000000000000", "train.max_steps: 1000000000000000000 is beyond 2,147,483,647"),
    ("rollout.max_completion_length=1000000000000000000", "rollout.max_completion_length: 1000000000000000000"),
    ("train.num_train_epochs=1e+300", "train.num_train_epochs = 1e+300: Input should be less"),
    ("health.min_entropy=1e+308", "health.min_entropy = 1e+308: Input should be less than or equal to 100"),
    ("registry.model_name='Qwen/mine'", "registry.model_name = 'Qwen/mine': String should match"),
    ("registry.model_name='a:b'", "registry.model_name = 'a:b'"),
    ("registry.model_name=' '", "leave it out to use the run's name"),
    ("registry.model_name='..'", "'..' cannot be the name of a model"),
    ("registry.experiment=''", "registry.experiment = ''"),
    ("registry.alias='a b'", "registry.alias = 'a b'"),
    ("registry.alias=''", "registry.alias = ''"),
    ("registry.alias='Latest'", "'Latest' is reserved in MLflow"),
    ("registry.alias='v12'", "'v12' is reserved in MLflow"),
    ("registry.alias='champion'", "'champion' is set only by a promotion; register under another alias"),
    ("rewards=[{function='length', name='..'}]", "rewards.0.name = '..'"),
    (
        f"rewards=[{{function='length', name='{'r' * 101}'}}]",
        "at most 100 characters",
    ),
    ("rewards=[{function='length', args={'a$'=1}}]", "args has the key 'a$'"),
    *(
        (f"{key}=1e300", f"{key} = 1e+300: Input should be less than or equal to 604800")
        for key in [f"environment.{each}_timeout" for each in ("tool", "conversation")]
        + [f"rollout.vllm_{each}_timeout" for each in ("server", "request")]
        + ["train.hang_timeout"]
    ),
    *(
        (
            f"rollout={{engine='{engine}', temperature=0.009}}",
            f"temperature=0.009 with engine='{engine}': vLLM samples at",
        )
        for engine in ("vllm", "vllm-server", "auto")
    ),
    ("rollout.vllm_args.kv_cache_dtype='fp8'", 'kv_cache_dtype="fp8" is not passed to vLLM: no 8-bit KV cache'),
    ("rollout.vllm_args.quantization='fp8'", "no quantised weights in vLLM"),
    ("rollout.vllm_args.gpu_memory_utilization=0.5", "set rollout.gpu_memory_utilization"),
    ("rollout.vllm_args.block_size=32", "block_size=32 is not passed to vLLM: it is not known to be safe; allowed are"),
    ("rollout.vllm_args.enforce_eager=false", "enforce_eager=false has to be true, or left out"),
    ("rollout.vllm_args.max_num_seqs=0", "max_num_seqs=0 is not a whole number above 0"),
    ("rollout.vllm_args.speculative_config.method='suffix'", "only method='ngram' is passed to vLLM; suffix decoding"),
    ("rollout.vllm_args.speculative_config.method='ngram'", "speculative_config.num_speculative_tokens=None is not a"),
    (NGRAMS + "; rollout.vllm_args.speculative_config.model='x'", "speculative_config.model is not passed to vLLM"),
    (NGRAMS.replace("min=1", "min=4"), "prompt_lookup_min=4 is above prompt_lookup_max=3"),
    (NGRAMS.replace("tokens=4", "tokens=8"), "num_speculative_tokens=8 with max_num_batched_tokens=None"),
    (NGRAMS + "; rollout.vllm_args.max_num_seqs=64", "with max_num_batched_tokens=None and max_num_seqs=64"),
    (
        NGRAMS + "; rollout.vllm_args.max_num_seqs=128; rollout.vllm_args.max_num_batched_tokens=639",
        "with max_num_batched_tokens at least 5 · max_num_seqs",
    ),
    (NGRAMS + "; rollout.min_p=0.1", "vLLM ignores min_p when it speculates"),
    (
        NGRAMS + "; rollout.engine='vllm-server'; rollout.max_staleness=1",
        "sampling ahead with speculation has",
    ),
    (NGRAMS + "; rollout.top_k=5", "rollout.top_k=5 with rollout.top_p=1"),
    (NGRAMS + "; evaluation.top_k=5; evaluation.temperature=1", "evaluation.top_k=5 with evaluation.top_p=1"),
    (NGRAMS + "; rollout.engine='vllm'; algorithm.routing_replay=true", "the experts of guessed tokens"),
    ("rollout={engine='transformers', vllm_args={enforce_eager=true}}", "which is not vLLM: remove them"),
    (f"name='{5000 * 'x'}'", "xx…: String should have at most 200 characters"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_a_mistake_is_named_with_its_key_and_a_way_out(text: str, message: str) -> None:
    given = tomllib.loads(text.replace("; ", "\n"))
    model = {**VALUES["model"], **given.pop("model", {})}
    with pytest.raises(ConfigError) as error:
        parse_config({**VALUES, "model": model, **given})
    assert message in str(error.value)


def test_null_is_no_argument_of_a_reward() -> None:
    with pytest.raises(ConfigError, match=r"args\.target is null"):
        parse_config(with_key("rewards.0.args", {"target": None}))


@pytest.mark.parametrize(
    ("key", "change"),
    [
        (
            "environment.environment_args.url",
            {
                "environment": {
                    "environment_factory": "openenv",
                    "environment_args": {"url": "http://me:SECRET@host:8000"},
                }
            },
        ),
        ("rewards.0.args.url", {"rewards": [{"function": "own:score", "args": {"url": "https://host/?code=SECRET"}}]}),
        ("rewards.0.args.url", {"rewards": [{"function": "own:score", "args": {"url": " http://me:SEC RET@host\n"}}]}),
        ("a key of data.chat_template_kwargs", {"data": {"chat_template_kwargs": {"http://me:SECRET@host": 1}}}),
        ("data.chat_template_kwargs.of.1", {"data": {"chat_template_kwargs": {"of": [1, "redis://:SECRET@host"]}}}),
    ],
)
def test_no_address_with_a_secret_is_taken_wherever_it_stands(key: str, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{key} is an address with a user, password, token") as refused:
        parse_config({**VALUES, **change, "data": {**VALUES["data"], **change.get("data", {})}})
    assert "SECRET" not in str(refused.value)


@given(key=st.sampled_from(NUMBERS), value=st.booleans() | st.sampled_from(["1", "1e9", "true", "yes", ""]))
def test_neither_text_nor_truth_values_are_taken_for_numbers(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(with_key(key, value))
    assert f"{key} = {value!r}: Input should be a valid" in str(error.value)


@pytest.mark.parametrize("key", ["rewards.0.clip", "rewards.0.range"])
@pytest.mark.parametrize("bounds", [[True, 2], [0, "1"]])
def test_bounds_are_numbers(key: str, bounds: list[Any]) -> None:
    with pytest.raises(ConfigError, match=rf"{key}\.[01] = .*: Input should be a valid number"):
        parse_config(with_key(key, bounds))


@pytest.mark.parametrize("value", ["true", "no", 1, 0])
def test_truth_values_are_true_or_false(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"model\.use_peft = .*: Input should be a valid boolean"):
        parse_config(with_key("model.use_peft", value))


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        parse_config({**VALUES, "algorithm": {"epsilon": -1, "beta": -1}, "sed": 3, "rewards": [{"weight": 1}]})
    assert len(str(error.value).splitlines()) == 4


FULL: dict[str, Any] = {
    **VALUES,
    "seed": 2**31 - 1,
    "model": {"name_or_path": 'a "quoted" naïve\\path', "revision": "main"},
    "rewards": [
        {"function": "length", "weight": -0.1, "args": {"target": 3}},
        {"function": "length", "name": "long", "clip": [0, 0.5], "normalize": True, "gate": "f", "gate_threshold": 0.2},
        {"function": "mine.rewards:f", "args": {"nested": {"list": [1, 2.5, "x"]}, "pattern": "<a>\n.*"}},
    ],
    "train": {"learning_rate": 1e-300, "steps_per_generation": 4, "max_steps": 7},
    "algorithm": {"epsilon_high": 0.28, "delta": 3.0},
    "evaluation": {"accuracy_reward": "f"},
}


@pytest.mark.parametrize(
    "config", [*map(load_config, CONFIGS), parse_config(VALUES), parse_config(FULL)], ids=lambda config: config.name
)
def test_a_written_configuration_reads_back_the_same(config: RunConfig) -> None:
    assert parse_config(tomllib.loads(dump_config(config))) == config


def test_overrides_take_toml_values_and_bare_words() -> None:
    overrides = ["train.max_steps=7", "rollout.engine=vllm", "train.learning_rate=2e-5", "rewards.0.weight=0.5"]
    config = load_config(CONFIGS[0], overrides)
    assert (config.train.max_steps, config.rollout.engine) == (7, "vllm")
    assert (config.train.learning_rate, config.rewards[0].weight) == (2e-5, 0.5)


@pytest.mark.parametrize(
    "override",
    ["train.max_steps", "train.max_stps=1", "rewards.7.weight=1", "rewards.first.weight=1", "name.x=1", "train=3"],
)
def test_an_override_that_fits_nowhere_is_named(override: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(CONFIGS[0], [override])
    assert override.partition("=")[0] in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no such file"), ("name = ", "not valid TOML"), ("name = 'x'", "model: missing")]
)
def test_an_unusable_file_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "c.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_every_key_says_what_it_means_and_what_it_accepts() -> None:
    described = list(describe_keys())
    assert [key for key, _, accepts, meaning in described if not (accepts and meaning)] == []
    assert {"seed", "train.learning_rate", "rewards.function"} <= {key for key, *_ in described}


def test_a_configuration_cannot_be_changed_by_accident() -> None:
    config: Any = RunConfig.model_validate(VALUES)
    with pytest.raises(Exception, match="frozen"):
        config.algorithm.beta = 1.0
