"""Whether a prompt fits is decided from its bytes where that is safe, and the answer is always that of the tokenizer;
before data are validated, forecasts know the lengths of the first prompts, and what a run's last training says about
sampling ahead."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from grpo_core.config.files import parse_config
from grpo_core.planning.ahead_forecast import EarlierSampling
from grpo_core.planning.shapes import PromptLengths
from tasks.data.forecast_inputs import FIRST, earlier_sampling, first_lengths
from tasks.data.lengths import (
    BYTES_PER_TOKEN,
    GIANT,
    LONGEST,
    SAMPLED,
    TOGETHER,
    fit,
    may_fit,
    renders,
    sample_lengths,
    token_lengths,
)
from tasks.data.rows import of_frame
from tests.conftest import config_values, make_run

CORPUS = ["the sum of two numbers is a number", "la somme de deux nombres", "и сумма двух чисел"]
TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|system|>You are a helpful assistant.<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _byte_level(normalizer: Any = None) -> Any:
    """GPT-2's and Qwen's kind: every byte is a token at worst."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    if normalizer:
        tokenizer.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)


def _byte_fallback() -> Any:
    """Llama's and Gemma's kind: a space becomes ▁, what is unknown becomes its bytes."""
    vocabulary = {"<unk>": 0, **{f"<0x{n:02X}>": n + 1 for n in range(256)}, "▁": 257, "a": 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)


TOKENIZERS = {
    "byte level": _byte_level(),
    "byte level, NFKC": _byte_level(normalizers.NFKC()),
    "byte level, NFD": _byte_level(normalizers.NFD()),
    "byte fallback": _byte_fallback(),
}
# Single characters that a normalisation makes many of, among ordinary text.
TEXT = st.text("abc é\n的\ufdfa\u0390\U0001f600", min_size=1, max_size=60) | st.text(min_size=1, max_size=60)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
@given(texts=st.lists(TEXT, min_size=1, max_size=8), spare=st.integers(-2, 1))
def test_a_text_fits_just_when_its_tokens_do(name: str, texts: list[str], spare: int) -> None:
    _expect_the_tokenizer_s_word(pl.Series(texts), TOKENIZERS[name], spare)


def _expect_the_tokenizer_s_word(prompts: pl.Series, tokenizer: Any, spare: int) -> None:
    """With room for the longest prompt and `spare` tokens more, or fewer."""
    lengths = token_lengths(prompts, tokenizer)
    room = max(lengths.max() + spare, 1)
    assert fit(prompts, tokenizer, room).to_list() == (lengths <= room).to_list()


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
@given(
    conversations=st.lists(
        st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXT), min_size=1, max_size=4),
        min_size=1,
        max_size=5,
    ),
    spare=st.integers(-2, 1),
)
def test_a_conversation_fits_just_when_its_tokens_do(
    name: str, conversations: list[list[tuple[str, str]]], spare: int
) -> None:
    prompts = pl.Series([[{"role": role, "content": text} for role, text in turns] for turns in conversations])
    _expect_the_tokenizer_s_word(prompts, TOKENIZERS[name], spare)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
@given(texts=st.lists(TEXT, min_size=1, max_size=8), room=st.integers(1, 20))
def test_a_text_with_too_many_bytes_for_any_tokens_is_too_long(name: str, texts: list[str], room: int) -> None:
    """No text that fits is among them, also where a normalisation makes fewer bytes of it."""
    prompts = pl.Series([*texts, "𝐀" * room, "Ａ" * room, " " * room, "x" * 10**4])
    may = may_fit(prompts, TOKENIZERS[name], room)
    assert (may | (token_lengths(prompts, TOKENIZERS[name]) > room)).all()
    assert not may[-1]


def _of_words() -> Any:
    """BERT's kind: white space is dropped, and a word that is too long is one unknown token."""
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)


def test_a_text_that_the_tokenizer_makes_few_tokens_of_is_long_only_as_a_giant() -> None:
    prompts = pl.Series(["a" + " " * 100_000 + "b", "x" * 100_000, "a" + " " * GIANT + "b"])
    assert token_lengths(prompts, _of_words()).to_list() == [2, 1, 2]
    assert may_fit(prompts, _of_words(), 10).to_list() == [True, True, False]
    assert may_fit(prompts, _of_words(), GIANT // BYTES_PER_TOKEN + 1).all()


def test_a_token_that_swallows_the_blanks_beside_it_makes_no_text_long() -> None:
    tokenizer = _byte_level()
    tokenizer.add_tokens(AddedToken("<mask>", lstrip=True))
    prompts = pl.Series(["a" + " " * 100_000 + "<mask>"])
    assert token_lengths(prompts, tokenizer).to_list() == [2]
    assert may_fit(prompts, tokenizer, 10).all()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_what_the_chat_template_leaves_out_does_not_count(name: str) -> None:
    tokenizer = copy.copy(TOKENIZERS[name])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    thought = [{"role": "assistant", "content": "x" * 50_000 + "</think>a"}, {"role": "user", "content": "a"}]
    asked = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "x" * 50_000}]
    assert may_fit(pl.Series([thought, asked]), tokenizer, 10).to_list() == [True, False]


def test_what_the_template_refuses_is_found_by_roles_and_by_what_each_message_says() -> None:
    conversations = [["user"], ["system", "user"], ["user", "tool", "user"], ["user"]] * TOGETHER
    prompts = pl.Series([[{"role": role, "content": "x"} for role in roles] for roles in conversations])
    assert renders(prompts, TOKENIZERS["byte level"]).to_list() == [True, True, False, True] * TOGETHER
    tokenizer = copy.copy(TOKENIZERS["byte level"])
    tokenizer.chat_template = (
        "{% for m in messages %}{% if '7' in m.content %}{{ raise_exception('no 7') }}{% endif %}"
        "{{ m.content.strip('8') if '9' not in m.content else m.content.nope() }}{% endfor %}"
    )
    said = range(2 * TOGETHER)
    prompts = pl.Series([[{"role": "user", "content": str(n)}] for n in said])
    assert renders(prompts, tokenizer).to_list() == [not {*"79"} & {*str(n)} and {*str(n)} != {"8"} for n in said]


def test_a_template_may_read_a_switch_out_of_a_text_and_leave_no_message_out() -> None:
    tokenizer = copy.copy(TOKENIZERS["byte level"])
    prompts = pl.Series(
        [
            [{"role": "system", "content": it}, {"role": "user", "content": "1+1? /no_think"}]
            for it in ("/no_think", "x ")
        ]
    )
    for condition, is_whole in (("true", True), ("m.role == 'user'", False)):
        tokenizer.chat_template = (
            f"{{% for m in messages if {condition} %}}{{{{ m.content.replace('/no_think', '') | trim }}}}{{% endfor %}}"
        )
        assert renders(prompts, tokenizer).to_list() == [is_whole] * 2
    asked = [{"role": role, "content": f"{role} says"} for role in ("user", "assistant", "tool")]
    for kept, is_whole in (("tool", True), ("nobody", False)):
        tokenizer.chat_template = (
            f"{{% for m in messages if m.role in ('user', '{kept}') %}}{{{{ m.content }}}}{{% endfor %}}"
        )
        assert renders(pl.Series([asked]), tokenizer).to_list() == [is_whole]


def test_a_model_without_a_limit_takes_every_prompt() -> None:
    assert fit(pl.Series(["a" * 10_000]), TOKENIZERS["byte level"], None).to_list() == [True]


@pytest.mark.slow
def test_the_sampled_lengths_hold_the_longest_prompts() -> None:
    frame = pl.DataFrame({"prompt": ["a"] * (2 * SAMPLED) + ["b" * 50] * 3})
    lengths = sample_lengths(of_frame(frame), TOKENIZERS["byte fallback"], {"": {}})
    assert SAMPLED - LONGEST <= len(lengths) <= SAMPLED
    assert lengths.max() == token_lengths(frame["prompt"].tail(1), TOKENIZERS["byte fallback"])[0]


def _lengths(model_folder: Path, folder: Path, prompts: list[Any]) -> PromptLengths | None:
    pl.DataFrame({"prompt": prompts}).write_parquet(folder / "train.parquet")
    return first_lengths(parse_config(config_values(model_folder, folder)))


def test_texts_and_conversations_have_the_lengths_of_the_first_ones(model_folder: Path, tmp_path: Path) -> None:
    found = _lengths(model_folder, tmp_path, ["1", "12+34", None, *["123"] * (FIRST - 3), "1" * 50])
    assert found is not None
    assert (found.mean, found.longest) == (pytest.approx(3, abs=0.01), 5)
    assert f"of the first {FIRST - 1} prompts" in found.how
    conversations = [[{"role": "user", "content": "12+34"}], [{"role": "user", "content": "1"}]]
    found = _lengths(model_folder, tmp_path, conversations)
    assert found is not None
    assert (found.mean, found.longest) == (3, 5)


@pytest.mark.parametrize("prompts", [[], [None], [3, 4], [[1], [2]], [""], [{"role": "user"}]])
def test_prompts_that_tell_no_lengths_prevent_no_plan(prompts: list[Any], model_folder: Path, tmp_path: Path) -> None:
    assert _lengths(model_folder, tmp_path, prompts) is None


def test_data_and_tokenizers_that_cannot_be_read_prevent_no_plan(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert _lengths(tmp_path, tmp_path, ["1"]) is None
    (tmp_path / "tokenizer.json").write_text("damaged")
    assert _lengths(tmp_path, tmp_path, ["1"]) is None
    (tmp_path / "train.parquet").write_text("damaged")
    assert first_lengths(parse_config(config_values(model_folder, tmp_path))) is None
    (tmp_path / "train.parquet").unlink()
    assert first_lengths(parse_config(config_values(model_folder, tmp_path))) is None


def trained_run(folder: Path, steps: list[int], **keys: Any) -> Path:
    """A run whose generation batches were sampled for these updates, four updates in all."""
    run = make_run(folder, config_values(folder, folder, engine="vllm-server", num_generations=2, **keys))
    (run / "training" / "completions").mkdir(parents=True)
    lengths = [3, 5, 4, 4]
    for number, step in enumerate(steps):
        columns = {"prompt_tokens": [6, 6, 8, 8], "completion_tokens": [number + length for length in lengths]}
        table = pl.DataFrame({"step": [step] * 4, **columns})
        table.write_parquet(run / "training" / "completions" / f"rollout-{number:06d}.parquet")
    rows = [
        {"step": step, "step_time": 10.0 * step, "time/generate": float(step), "time/score": 0.5}
        for step in (1, 2, 3, 4)
    ]
    (run / "training" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_each_generation_batch_has_its_lengths_by_group_and_its_seconds(tmp_path: Path) -> None:
    found = earlier_sampling(trained_run(tmp_path / "run", [1, 2, 3, 4], vllm_num_servers=3, num_processes=2))
    assert isinstance(found, EarlierSampling)
    assert (found.servers, found.processes) == (3, 2)
    assert "3 generation batches of run run" in found.how  # without the first, in which servers warm up
    first = found.batches[0]
    assert first.lengths == [[4, 6], [5, 5]]
    assert (first.prompt_tokens, first.sample_seconds) == (7.0, 2.0)
    assert (first.train_seconds, first.other_seconds) == (17.5, 0.5)


@pytest.mark.parametrize(
    ("steps", "seconds"), [([1, 3], [70.0 - 3.5]), ([1, 1, 3, 3], [30.0 / 2 - 1.5, 70.0 / 2 - 3.5, 70.0 / 2 - 3.5])]
)
def test_batches_for_several_updates_and_updates_of_several_batches_share_seconds(
    tmp_path: Path, steps: list[int], seconds: list[float]
) -> None:
    """Updates 1 and 2 take 30 s, 3 and 4 take 70 s. Each samples for as many seconds as its number, and
    scores for 0.5 s."""
    found = earlier_sampling(trained_run(tmp_path / "run", steps))
    assert isinstance(found, EarlierSampling)
    assert [batch.train_seconds for batch in found.batches] == seconds


def test_a_training_that_tells_nothing_is_named(tmp_path: Path) -> None:
    assert "has not been trained: train some updates with" in str(earlier_sampling(tmp_path / "none"))
    ahead = trained_run(tmp_path / "ahead", [1, 2, 3, 4], max_staleness=1)
    assert "does not show how fast servers are" in str(earlier_sampling(ahead))
    damaged = trained_run(tmp_path / "damaged", [1, 2, 3, 4])
    (damaged / "training" / "metrics.jsonl").write_text("{")
    assert "cannot be read" in str(earlier_sampling(damaged))
