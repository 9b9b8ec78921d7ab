"""What a training does with its model before its first update, tried on a small copy with random weights, on a CPU.

Entry point: `python -m grpo_core.try_small REQUEST`, with the arguments of `try_small` as JSON. The last line that it
prints is what that returns, as JSON.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from grpo_core.errors import ConfigError, GrpoError
from grpo_core.system.libraries import quiet_libraries
from grpo_core.system.processes import importing, run_and_leave

if __name__ == "__main__":
    quiet_libraries()  # before they are imported
with importing():
    import torch
    from transformers import AutoConfig

    from grpo_core.config.inputs import ModelConfig
    from grpo_core.model.capabilities import in_words, random_ids
    from grpo_core.model.loading import load_model, with_adapter
    from grpo_core.model.policy import Policy
    from grpo_core.model.pretrained import from_pretrained, model_class, usable_positions
    from grpo_core.model.routing import routers_of
    from grpo_core.model.sequences import Sequences
    from grpo_core.model.small_copy import write_small_copy
    from grpo_core.rollout.loading import check_lengths
    from grpo_core.rollout.transformers_engine import TransformersEngine
    from grpo_core.rollout.types import Request, Sampling

LARGEST = 2**27  # bytes of the copy's weights
TOKENS = 24  # of each sequence of a pass


def main() -> None:
    print(json.dumps(try_small(**json.loads(sys.argv[1]))), flush=True)


def try_small(model: dict[str, Any], max_length: int, bf16: bool, **keys: Any) -> dict[str, str]:
    """Return why a training would refuse a small copy of the model, as "refused", "" if it would not; or why that was
    not tried, as "untried". `model`: keys of [model]; `max_length`: tokens of the run's longest sequence."""
    of_model = ModelConfig(**model)
    path, revision = of_model.name_or_path, of_model.revision
    torch.manual_seed(0)
    try:
        model_class(from_pretrained(AutoConfig, path, revision), path)
        with TemporaryDirectory() as folder:
            write_small_copy(path, revision, Path(folder), LARGEST)
            small = load_model(folder)
        for weights in small.parameters():  # large enough for attention to tell tokens apart
            if weights.dim() > 1:
                torch.nn.init.normal_(weights, std=weights.shape[-1] ** -0.5)
        ids = random_ids(small, (2, TOKENS))
        small(input_ids=ids, use_cache=False).logits.sum().backward()
        small.zero_grad()
        with torch.no_grad():
            small(input_ids=ids, use_cache=True)
    except ConfigError as error:
        return {"refused": str(error)}
    except Exception as error:  # of whatever kind: it says something about the copy only
        return {"untried": in_words(error)}
    max_length = min(max_length, usable_positions(small.config) or max_length)  # validate knows the real lengths
    named = [*(of_model.lora_target_modules or ()), *(of_model.lora_modules_to_save or ())]
    try:
        if not re.search(r"\d\.", " ".join(named)):  # else they name layers of the model, not of its copy
            small = with_adapter(small, of_model)
        _begin(small, max_length, bf16=bf16, **keys)
    except GrpoError as error:
        return {"refused": str(error)}
    except NotImplementedError as error:  # here, on a CPU
        return {"untried": in_words(error)}
    except Exception as error:  # of whatever kind: it would end the training
        refused = f"with a small copy of it, {in_words(error)}"
        if bf16:
            with suppress(Exception):
                _begin(small, max_length, bf16=False, **keys)
                refused += "; set train.mixed_precision to 'no', in which the copy is trained"
        return {"refused": refused}
    return {"refused": ""}


def _begin(
    small: Any, max_length: int, *, engine: str, bf16: bool, gradient_checkpointing: bool, router_keys: list[str]
) -> None:
    """Do with the copy what a training does with its model, up to a pass and some completions."""
    check_lengths(small, max_length)
    policy = Policy(small, 1.0, max_length=max_length, bf16=bf16, gradient_checkpointing=gradient_checkpointing)
    with nullcontext() if router_keys else suppress(ConfigError):
        policy.routers = routers_of(policy.model, router_keys)
    lengths = torch.full((2,), TOKENS // 2)
    inputs = policy.prepare(Sequences(random_ids(small, (2, TOKENS)), lengths, lengths, torch.arange(2)))
    with policy.routing(inputs):
        policy(inputs)[0].sum().backward()
    if engine == "transformers":
        # Tokens of the copy's small vocabulary in place of the model's own.
        sampler = TransformersEngine(policy.model, SimpleNamespace(pad_token_id=0, eos_token_id=0), max_length)
        sampler.routers = policy.routers
        for _ in sampler.generate([Request([1, 2, 3], 2, 0), Request([1, 2], 2, 0)], Sampling(3)):
            pass


if __name__ == "__main__":
    run_and_leave(main)
