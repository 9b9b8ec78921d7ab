"""The operations of a teacher in the plan, against those that torch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen2Config

from grpo_core.config.run import RunConfig
from grpo_core.model import logprobs
from grpo_core.model.policy import Policy
from grpo_core.model.sequences import Sequences
from grpo_core.planning.shapes import ModelShape, PromptLengths, model_shape
from grpo_core.planning.wall_time import update_flops
from tests.grpo_core.planning.test_forecast import config_with, plan_of

GROUP, ROWS, PROMPT, SHOWN, COMPLETION = 4, 8, 12, 30, 24
SIZES: dict[str, Any] = {"vocab_size": 3000, "num_hidden_layers": 6, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "tie_word_embeddings": True}
DIVERGENCE = {"divergence_beta": 0.5}


def _model(width: int) -> tuple[Policy, ModelShape]:
    shape = Qwen2Config(**SIZES, hidden_size=width, intermediate_size=3 * width)
    return Policy(AutoModelForCausalLM.from_config(shape).eval(), 1.0), model_shape(shape.to_dict())


def _sequences(prompt: int, prompts: int) -> Sequences:
    ids, rows = torch.randint(3000, (ROWS, prompt + COMPLETION)), torch.arange(ROWS)
    return Sequences(ids, torch.full((ROWS,), prompt), torch.full((ROWS,), COMPLETION), rows // (ROWS // prompts))


@pytest.mark.parametrize(
    ("keys", "read"),
    [
        ({"model": "teacher"}, _sequences(PROMPT, ROWS // GROUP)),
        ({"model": "teacher", **DIVERGENCE}, _sequences(PROMPT, ROWS // GROUP)),
        ({"template": "{prompt}{answer}"}, _sequences(SHOWN, ROWS // GROUP)),
        ({"template": "{prompt}{answer}", **DIVERGENCE}, _sequences(SHOWN, ROWS // GROUP)),
        ({"template": "{prompt}{better}"}, _sequences(SHOWN, ROWS)),
        ({"template": "{prompt}{better}", **DIVERGENCE}, _sequences(SHOWN, ROWS)),
    ],
    ids=lambda keys: " ".join(keys) if isinstance(keys, dict) else "",
)
def test_a_teacher_adds_to_an_update_what_torch_counts(
    keys: dict[str, Any], read: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "KEPT_LOGITS", 0)  # as with a vocabulary of usual size
    (policy, shape), (other, others) = _model(64), _model(128)
    own, rows = _sequences(PROMPT, ROWS // GROUP), torch.arange(ROWS)
    teacher = other if "model" in keys else policy

    def counted(**given: Any) -> float:
        with FlopCounterMode(display=False) as counter:
            taught = None
            if "divergence_beta" in given:
                taught = [teacher.as_teacher(read, rows, 0.5, 0)]
            elif given:
                with torch.no_grad():
                    teacher(teacher.prepare(read))
            found = policy(policy.prepare(own), taught=taught)
            (found[0].sum() + (found[2].sum() if taught else 0.0)).backward()
        return counter.get_total_flops()

    def told(**given: Any) -> float:
        values = config_with(
            per_device_train_batch_size=ROWS,
            num_generations=GROUP,
            max_completion_length=COMPLETION,
            gradient_accumulation_steps=1,
        ).model_dump()
        config = RunConfig.model_validate(values | {"teacher": values["teacher"] | given})
        plan = plan_of(config)
        lengths = PromptLengths(PROMPT, PROMPT, "", SHOWN if "template" in given else 0)
        teachers = {"teacher": others} if "model" in given else {}
        return update_flops(config, plan, lengths, shape, teachers) * ROWS / plan.completions

    assert told(**keys) - told() == pytest.approx(counted(**keys) - counted(), rel=0.1)
