"""Prompts as tokens, and their order: a pure function of seed and rollout number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from grpo_core.data.chat import decode_completions, encode_prompts
from grpo_core.data.order import Schedule, derive_seed, training_order
from grpo_core.data.prompts import load_prompts
from grpo_core.errors import ConfigError
from grpo_core.planning.plan import Plan, make_plan
from grpo_core.planning.rules import PlanInputs
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
    prompt, ids = tokenizer("1+1=")["input_ids"], [*tokenizer("2")["input_ids"], tokenizer.eos_token_id]
    conversation = {"prompt": [{"role": "user", "content": "1+1"}]}
    assert decode_completions([{"prompt": "1+1="}], [prompt], [ids], tokenizer) == ["2"]
    assert decode_completions([conversation], [prompt], [ids], tokenizer) == [[{"role": "assistant", "content": "2"}]]


@pytest.mark.parametrize(
    ("text", "stop", "seen"),
    [
        ("12=345", ("=",), "12"),
        ("12=345", ("45", "2="), "1"),
        ("12=345", ("6", "67"), "12=345"),
        ("12=345", ("1",), ""),
        ("12=12=", ("2=",), "1"),
    ],
)
@pytest.mark.parametrize("chat", [False, True])
def test_rewards_see_what_comes_before_a_text_to_stop_at(
    tokenizer: Any, text: str, stop: tuple[str, ...], seen: str, chat: bool
) -> None:
    row = {"prompt": [{"role": "user", "content": "1+1"}] if chat else "1+1="}
    prompt, ids = tokenizer("1+1=")["input_ids"], tokenizer(text)["input_ids"]
    expected = [{"role": "assistant", "content": seen}] if chat else seen
    assert decode_completions([row], [prompt], [ids], tokenizer, stop) == [expected]


def make_sentencepiece() -> Any:
    """A tokenizer of Llama 2's parts: a space before the text, one token per word or character, bytes for others."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "▁answer", "▁is", "▁42", *"theanswri42."]
    vocabulary = {piece: -float(number) for number, piece in enumerate(dict.fromkeys(pieces))}
    core = Tokenizer(models.Unigram([*vocabulary.items()], unk_id=0, byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


SENTENCEPIECE = make_sentencepiece()


@pytest.mark.slow
@settings(max_examples=200)
@given(st.text(min_size=1, max_size=8), st.text(max_size=8), st.booleans())
def test_prompt_and_completion_are_the_text_that_was_written(prompt: str, completion: str, ends: bool) -> None:
    """Whatever tokens say the completion: those of the whole text after the prompt's. Special tokens are no text."""
    tokenizer = SENTENCEPIECE
    text = "the answer" + prompt
    prompt_ids, whole = tokenizer(text)["input_ids"], tokenizer(text + " is" + completion)["input_ids"]
    assume(whole[: len(prompt_ids)] == prompt_ids)
    ids = whole[len(prompt_ids) :] + [tokenizer.eos_token_id] * ends
    (written,) = decode_completions([{"prompt": text}], [prompt_ids], [ids], tokenizer)
    assert tokenizer.decode(prompt_ids, skip_special_tokens=True) + written == tokenizer.decode(
        whole, skip_special_tokens=True
    )
    assert written.startswith(" is")


def test_bytes_that_make_no_character_leave_a_completion_readable() -> None:
    """After a prompt that ends in bytes, they would change how those are shown."""
    prompt, broken = SENTENCEPIECE("the é")["input_ids"], SENTENCEPIECE.convert_tokens_to_ids(["<0xE2>", "▁42"])
    assert decode_completions([{"prompt": "the é"}], [prompt], [broken], SENTENCEPIECE) == ["\ufffd 42"]


def test_a_tokenizer_that_ends_prompts_is_refused(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    end, end_id = tokenizer.eos_token, tokenizer.eos_token_id
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": ["1+1=", f"2+2={end}"]}), path)
    assert load_prompts(path, tokenizer).ids[1][-1] == end_id  # as the text says
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        f"$A {end}", special_tokens=[(end, end_id)]
    )
    with pytest.raises(ConfigError, match=r"puts its end token .* after each prompt.*add_eos_token to false"):
        load_prompts(path, tokenizer)


def test_a_prompt_without_tokens_is_refused_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": ["1+1=", "?"]}), path)
    with pytest.raises(ConfigError, match=r"train.parquet, row 1: the tokenizer turns the prompt '\?' into no tokens"):
        load_prompts(path, make_tokenizer())


def test_an_epoch_visits_each_prompt_at_most_once_and_drops_what_the_plan_says(plan: Plan) -> None:
    for epoch in range(3):
        first = epoch * plan.rollouts_per_epoch
        seen = [p for r in range(first, first + plan.rollouts_per_epoch) for p in Schedule(plan, 7).prompts(r)]
        assert len(seen) == len(set(seen)) == plan.num_prompts - plan.dropped_prompts_per_epoch
    assert Schedule(plan, 7).prompts(0) != Schedule(plan, 7).prompts(plan.rollouts_per_epoch)
    assert Schedule(plan, 7).prompts(0) != Schedule(plan, 8).prompts(0)


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
