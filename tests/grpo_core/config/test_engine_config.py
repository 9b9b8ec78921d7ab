"""Precision, processes, sharding and engine: what goes together, and what is named because it doesn't."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_core.config.files import parse_config
from grpo_core.errors import ConfigError
from grpo_core.fingerprint import determining
from tests.grpo_core.config.test_config import VALUES, with_key


def test_the_transformers_engine_takes_a_temperature_that_vllm_would_raise() -> None:
    config = parse_config({**VALUES, "rollout": {"engine": "transformers", "temperature": 0.009}})
    assert config.rollout.temperature == 0.009


@pytest.mark.parametrize(
    ("given", "capability", "meant"),
    [
        ("auto", None, "no"),
        ("auto", (7, 5), "no"),
        ("auto", (8, 0), "bf16"),
        ("auto", (10, 0), "bf16"),
        ("no", (9, 0), "no"),
        ("bf16", None, "bf16"),
    ],
)
def test_the_precision_follows_from_the_gpu_where_it_is_not_given(
    given: str, capability: tuple[int, int] | None, meant: str
) -> None:
    config = parse_config(with_key("train.mixed_precision", given))
    assert config.with_precision(capability) == parse_config(with_key("train.mixed_precision", meant))
    assert parse_config(VALUES).train.mixed_precision == "auto"


@pytest.mark.parametrize("engine", ["auto", "vllm", "vllm-server", "transformers"])
@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_the_processes_that_sample_together_divide_those_that_train(engine: str, processes: int) -> None:
    values = with_key("rollout", {"engine": engine, "vllm_tensor_parallel_size": 2})
    values["train"] = {"num_processes": processes}
    if engine in ("auto", "vllm") and processes % 2:
        with pytest.raises(ConfigError, match=f"train.num_processes={processes} is not a multiple of it"):
            parse_config(values)
    else:
        parse_config(values)


@pytest.mark.parametrize("engine", ["auto", "vllm", "vllm-server", "transformers"])
@pytest.mark.parametrize("precision", ["auto", "no", "bf16"])
def test_float32_in_vllm_on_a_gpu_is_named_with_what_to_set(engine: str, precision: str) -> None:
    values = with_key("rollout.engine", engine) | {"train": {"mixed_precision": precision}}
    notes = parse_config(values).gpu_notes
    assert bool(notes) == (precision == "no" and engine != "transformers")
    assert all("set train.mixed_precision to 'bf16'" in note for note in notes)


@pytest.mark.parametrize("engine", ["auto", "vllm", "vllm-server", "transformers"])
@pytest.mark.parametrize("sharding", ["none", "full", "hybrid"])
def test_a_whole_copy_to_sample_with_is_named_where_the_model_is_sharded(engine: str, sharding: str) -> None:
    train = {"num_processes": 2, "mixed_precision": "bf16", "sharding": sharding}
    notes = parse_config(with_key("rollout.engine", engine) | {"train": train}).gpu_notes
    assert bool(notes) == (engine == "transformers" and sharding != "none")
    assert all("a whole copy of the model" in note and "rollout.engine to 'vllm'" in note for note in notes)


@pytest.mark.parametrize("sharding", ["full", "hybrid"])
def test_sharding_needs_several_processes(sharding: str) -> None:
    with pytest.raises(ConfigError, match=f"sharding='{sharding}' with num_processes=1: a single process holds"):
        parse_config(VALUES | {"train": {"sharding": sharding}})
    parse_config(VALUES | {"train": {"sharding": sharding, "num_processes": 2}})


NGRAMS = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.mark.parametrize(
    ("args", "other_samples"),
    [
        ({"enforce_eager": True, "disable_custom_all_reduce": True, "enable_prefix_caching": False}, False),
        ({"max_num_batched_tokens": 8192, "max_num_seqs": 256}, False),
        ({"speculative_config": NGRAMS}, True),
        (
            {
                "speculative_config": {**NGRAMS, "num_speculative_tokens": 8},
                "max_num_seqs": 64,
                "max_num_batched_tokens": 576,
            },
            True,
        ),
    ],
)
def test_options_of_vllm_count_as_another_training_only_if_they_draw_other_samples(
    args: dict[str, Any], other_samples: bool
) -> None:
    given, plain = (parse_config(with_key("rollout.vllm_args", each)) for each in (args, {}))
    assert given.rollout.vllm_args == args
    assert (determining(given) != determining(plain)) == other_samples
