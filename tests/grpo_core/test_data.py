"""Prompts as tokens, and their order: a pure function of seed and rollout number."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_core.data import decode_completions, derive_seed, encode_prompts, rollout_prompts, training_order
from grpo_core.plan import Plan, make_plan
from grpo_core.rules import PlanInputs
from tests.conftest import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    return tokenizer


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(PlanInputs(23, 4, 2, max_completion_length=4, num_processes=2, steps_per_generation=5))


def test_a_conversation_goes_through_the_chat_template_and_asks_for_an_answer(tokenizer: Any) -> None:
    conversations = [[{"role": "user", "content": "12+3"}], [{"role": "user", "content": "4+5"}]]
    assert encode_prompts(conversations, tokenizer) == encode_prompts(["12+3=", "4+5="], tokenizer)


def test_rewards_see_text_for_text_and_a_message_for_a_conversation(tokenizer: Any) -> None:
    rows = [{"prompt": "1+1="}, {"prompt": [{"role": "user", "content": "1+1="}]}]
    ids = [[*tokenizer("2")["input_ids"], tokenizer.eos_token_id]] * 2
    assert decode_completions(rows, ids, tokenizer) == ["2", [{"role": "assistant", "content": "2"}]]


def test_an_epoch_visits_each_prompt_at_most_once_and_drops_what_the_plan_says(plan: Plan) -> None:
    for epoch in range(3):
        first = epoch * plan.rollouts_per_epoch
        seen = [p for r in range(first, first + plan.rollouts_per_epoch) for p in rollout_prompts(plan, 7, r)]
        assert len(seen) == len(set(seen)) == plan.num_prompts - plan.dropped_prompts_per_epoch
    assert rollout_prompts(plan, 7, 0) != rollout_prompts(plan, 7, plan.rollouts_per_epoch)
    assert rollout_prompts(plan, 7, 0) != rollout_prompts(plan, 8, 0)


def test_every_row_of_a_generation_batch_is_trained_once_a_pass(plan: Plan) -> None:
    order = training_order(plan, 7, 2)
    assert order.shape == (5, 2, 2)
    assert sorted(order.flatten().tolist()) == list(range(plan.generation_batch_size))


def test_an_update_trains_the_same_rows_however_it_is_cut(plan: Plan) -> None:
    one = make_plan(PlanInputs(23, 4, 4, max_completion_length=4, num_processes=1, steps_per_generation=5))
    for part in range(5):
        rows = [sorted(training_order(p, 7, 2)[part].flatten().tolist()) for p in (plan, one)]
        assert rows[0] == rows[1]


def test_seeds_differ_wherever_their_parts_do() -> None:
    seeds = {derive_seed(a, b, c) for a in range(10) for b in range(10) for c in range(10)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**48 for seed in seeds)
