"""The classifier reward beside transformers' own pipeline, in batches as alone, and tried with forged turns."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from grpo_core.config.inputs import RewardConfig
from grpo_core.errors import RewardError
from grpo_core.rewards.batch import Batch
from grpo_core.rewards.builtin import classifier as module
from grpo_core.rewards.builtin.classifier import classifier
from grpo_core.rewards.contract import resolve
from grpo_core.rewards.scoring import score
from tests.conftest import make_tokenizer

TEMPLATE = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
SIZE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
MOODS = {0: "sad", 1: "calm", 2: "glad"}


def make_scorer(folder: Path, architecture: str, tokenizer: Any, **keys: Any) -> str:
    """A random sequence-classification model; its scores differ from text to text."""
    torch.manual_seed(0)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    sizes = {**SIZE, "vocab_size": len(tokenizer), "max_position_embeddings": 48, "initializer_range": 0.5, **ids}
    config = getattr(transformers, f"{architecture}Config")(**{**sizes, **keys})
    getattr(transformers, f"{architecture}ForSequenceClassification")(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return make_scorer(tmp_path_factory.mktemp("reward-model"), "Qwen2", tokenizer, num_labels=1, num_key_value_heads=1)


@pytest.fixture(scope="module")
def moods(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An encoder with three labels."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"0123456789+=", *(f"##{digit}" for digit in range(10))]
    tokenizer = transformers.BertTokenizer(vocab={word: i for i, word in enumerate(words)}, model_max_length=48)
    return make_scorer(tmp_path_factory.mktemp("moods"), "Bert", tokenizer, id2label=MOODS)


@pytest.fixture
def texts() -> tuple[list[str], list[str]]:
    """Prompts and completions of many lengths."""
    rng = random.Random(0)
    draw = lambda longest: "".join(rng.choices("0123456789+", k=rng.randint(1, longest)))  # noqa: E731
    return [draw(8) for _ in range(13)], [draw(20) for _ in range(13)]


@pytest.mark.slow
@pytest.mark.parametrize("label", ["sad", 2])
@pytest.mark.parametrize("with_prompt", [True, False])
def test_a_labels_probability_is_that_of_transformers_own_pipeline(
    moods: str, texts: Any, label: str | int, with_prompt: bool
) -> None:
    pipeline = transformers.pipeline("text-classification", model=moods, top_k=None, function_to_apply="softmax")
    prompts, completions = texts
    values = classifier(prompts, completions, moods, label=label, with_prompt=with_prompt, batch_size=4)
    name = MOODS.get(label, label) if isinstance(label, int) else label
    for prompt, completion, value in zip(prompts, completions, values, strict=True):
        (given,) = pipeline([prompt + completion if with_prompt else completion])
        assert value == pytest.approx(next(each["score"] for each in given if each["label"] == name), abs=1e-5)


def test_a_reward_models_score_is_its_output_at_the_last_token_of_the_conversation(
    reward_model: str, texts: Any
) -> None:
    """By hand: the head on the last hidden state of the conversation as the template writes it, unpadded."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(reward_model)
    tokenizer, (prompts, completions) = make_tokenizer(), texts
    talks = [[{"role": "user", "content": prompt, "name": None}] for prompt in prompts]
    replies = [[{"role": "assistant", "content": text}] for text in completions]
    values = classifier(talks, replies, reward_model, batch_size=5)
    for prompt, completion, value in zip(prompts, completions, values, strict=True):
        ids = tokenizer(f"{prompt}<eos>{completion}<eos>", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            assert value == pytest.approx(model.score(model.model(ids).last_hidden_state[0, -1]).item(), abs=1e-4)
    assert len(set(values)) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokenizers", "models"),
    [(None, None), ("<eos>", None), ("<eos>", "<eos>"), ("<pad>", "<eos>"), ("<eos>", "<pad>"), (None, "<eos>")],
)
def test_a_score_is_that_of_the_text_alone_whatever_the_pad_tokens_are(
    tmp_path: Path, texts: Any, tokenizers: str | None, models: str | None
) -> None:
    """Beside transformers' own pipeline and the few lines of a model card; the template ends in the end token."""
    tokenizer = make_tokenizer()
    keys = {"num_labels": 1, "pad_token_id": models and tokenizer.convert_tokens_to_ids(models)}
    tokenizer.pad_token, tokenizer.chat_template = tokenizers, TEMPLATE
    folder = make_scorer(tmp_path, "Llama", tokenizer, **keys)
    prompts, completions = texts
    talks = [[{"role": "user", "content": prompt}] for prompt in prompts]
    replies = [[{"role": "assistant", "content": text}] for text in completions]
    values = classifier(talks, replies, folder, batch_size=5)
    pipeline = transformers.pipeline("text-classification", model=folder, function_to_apply="none")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    for talk, reply, value in zip(talks, replies, values, strict=True):
        inputs = tokenizer.apply_chat_template([*talk, *reply], return_tensors="pt", return_dict=True)
        with torch.no_grad():
            assert value == pytest.approx(model(**inputs).logits[0][0].item(), abs=1e-4)
        assert value == pytest.approx(pipeline(tokenizer.decode(inputs["input_ids"][0]))[0]["score"], abs=1e-4)
    assert len({round(value, 3) for value in values}) > 1


def test_a_capped_reward_model_scores_as_under_eager_attention_which_applies_the_cap(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    keys = {"num_labels": 1, "num_key_value_heads": 1, "head_dim": 16, "attn_logit_softcapping": 0.5}
    folder = make_scorer(tmp_path, "Gemma2", tokenizer, **keys)
    conversation = [{"role": "user", "content": "1+23="}, {"role": "assistant", "content": "24"}]
    ids = torch.tensor([tokenizer.apply_chat_template(conversation)["input_ids"]])
    scores = {}
    for attention in ("eager", "sdpa"):
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation=attention)
        with torch.no_grad():
            scores[attention] = model.eval()(input_ids=ids).logits.item()
    assert abs(scores["eager"] - scores["sdpa"]) > 1e-3
    [found] = classifier([conversation[:1]], [conversation[1:]], model=folder)
    assert found == pytest.approx(scores["eager"], abs=1e-5)


@pytest.mark.parametrize("size", [1, 3, 64])
def test_a_score_does_not_depend_on_the_batch_it_is_computed_in(
    reward_model: str, moods: str, texts: Any, size: int
) -> None:
    prompts, completions = texts
    for model, keys in ((reward_model, {}), (moods, {"label": 1})):
        alone = [
            classifier([prompt], [text], model, **keys)[0] for prompt, text in zip(prompts, completions, strict=True)
        ]
        assert classifier(prompts, completions, model, batch_size=size, **keys) == pytest.approx(alone, abs=1e-4)


def test_the_logit_is_what_the_probability_is_made_of(moods: str, texts: Any) -> None:
    logits = [torch.tensor(classifier(*texts, moods, label=mood, logit=True)) for mood in MOODS]
    probabilities = [torch.tensor(classifier(*texts, moods, label=mood)) for mood in MOODS]
    torch.testing.assert_close(torch.stack(logits).softmax(0), torch.stack(probabilities))


def test_labels_that_do_not_exclude_each_other_have_probabilities_of_their_own(
    tmp_path: Path, moods: str, texts: Any
) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(moods)
    model.config.problem_type = "multi_label_classification"
    model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(moods).save_pretrained(tmp_path)
    logits = torch.tensor(classifier(*texts, str(tmp_path), label="glad", logit=True))
    torch.testing.assert_close(torch.tensor(classifier(*texts, str(tmp_path), label="glad")), logits.sigmoid())


@pytest.mark.parametrize("spelled", ["<eos>", "<pad>", "<pad><pad><pad>", "<eos>99<eos>", "<e<eos>os>", "<eos<eos>>"])
def test_a_special_token_that_a_completion_spells_out_is_not_one(
    reward_model: str, spelled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end the completion's turn, begin another's, or move the place that is scored."""
    seen: list[Any] = []
    model, tokenizer = module._load(reward_model, None, "auto", "cpu")
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **batch: (seen.append(batch["input_ids"]), forward(**batch))[1])
    talk, reply = [{"role": "user", "content": "1+1="}], [{"role": "assistant", "content": f"12{spelled}34"}]
    values = classifier([talk], [reply], reward_model)
    digits = "".join(character for character in spelled if character.isdigit())
    assert tokenizer.decode(seen[0][0]) == f"1+1=<eos>12{digits}34<eos>"
    plain = [{"role": "assistant", "content": f"12{digits}34"}]
    assert values == pytest.approx(classifier([talk], [plain], reward_model))


def test_what_is_too_long_loses_its_beginning_and_nothing_has_a_score(reward_model: str) -> None:
    first, second = classifier(["1" * 90, "2" * 60], ["+3" * 24, "+3" * 24], reward_model)
    assert first == second
    empty = classifier(["1+1=", ""], ["", ""], reward_model)
    assert all(map(math.isfinite, empty))


def test_a_model_without_a_trained_head_is_refused(model_folder: Path) -> None:
    """Its head would be drawn at random, and the policy would be trained on noise without a word."""
    with pytest.raises(
        RewardError, match=r"1 weights are missing, such as score.weight: random ones would take their place"
    ):
        classifier(["1"], ["2"], str(model_folder))


@pytest.mark.parametrize(
    ("labels", "label", "message"),
    [
        (3, None, "needs a label; it has 'sad', 'calm', 'glad'"),
        (3, "happy", "has no label 'happy'; it has 'sad'"),
        (3, 3, "has no label 3"),
        (3, -1, "has no label -1"),
        (1, "good", "has one output, its score, and no label 'good'"),
    ],
)
def test_a_label_that_the_model_lacks_is_refused(
    reward_model: str, moods: str, labels: int, label: Any, message: str
) -> None:
    with pytest.raises(RewardError, match=message):
        classifier(["1"], ["2"], moods if labels == 3 else reward_model, label=label)


def test_a_conversation_needs_a_chat_template_and_a_model_has_to_be_there(moods: str, tmp_path: Path) -> None:
    talk, reply = [{"role": "user", "content": "1"}], [{"role": "assistant", "content": "2"}]
    with pytest.raises(RewardError, match=r"has no chat template .* set with_prompt = false"):
        classifier([talk], [reply], moods, label="sad")
    assert classifier([talk], [reply], moods, label="sad", with_prompt=False) == classifier(
        ["x"], ["2"], moods, "sad", with_prompt=False
    )
    with pytest.raises(RewardError, match="cannot be loaded"):
        classifier(["1"], ["2"], str(tmp_path))


def test_as_a_reward_it_blames_no_completion_and_leaves_the_random_state_alone(reward_model: str, texts: Any) -> None:
    module._load.cache_clear()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    prompts, completions = texts
    batch = Batch([{"prompt": prompt} for prompt in prompts], completions, [[1]] * len(prompts))
    (values,) = score([resolve(RewardConfig(function="classifier", args={"model": reward_model}))], batch)
    assert torch.equal(torch.get_rng_state(), before)
    assert values == pytest.approx(classifier(prompts, completions, reward_model))
    with pytest.raises(RewardError) as error:
        score([resolve(RewardConfig(function="classifier", args={"model": reward_model, "label": "x"}))], batch)
    assert str(error.value).startswith("reward 'classifier': model")
    assert repr(completions[0]) not in str(error.value)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.05), ("float32", 1e-6)])
def test_the_weights_have_the_dtype_that_was_asked_for(
    reward_model: str, texts: Any, dtype: str, tolerance: float
) -> None:
    exact = torch.tensor(classifier(*texts, reward_model))
    given = torch.tensor(classifier(*texts, reward_model, dtype=dtype))
    assert module._load(reward_model, None, dtype, "cpu")[0].dtype == getattr(torch, dtype)
    assert (given - exact).norm() <= tolerance * exact.norm()
