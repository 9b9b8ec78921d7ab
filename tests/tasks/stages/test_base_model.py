"""A GGUF file as base model: what is made of it is the model that it stands for, once, and whole or not at all."""

from __future__ import annotations

import fcntl
import json
import threading
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo_core.config.files import parse_config
from grpo_core.config.inputs import ModelConfig
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from grpo_core.fingerprint import content_hash
from grpo_core.planning.adapter import check_adapter
from tasks.data.lengths import load_tokenizer_and_context
from tasks.stages import base_model
from tasks.stages.base_model import ORIGIN, with_checkpoint
from tests.gguf_files import TEMPLATE, write_llama
from tests.made_up import values_of

FILE = "small.Q8_0.gguf"
KINDS = [GGMLQuantizationType[kind] for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0")]


@pytest.fixture(autouse=True)
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path / "storage"))
    return tmp_path / "storage"


def _config(folder: Path, file: str = FILE) -> RunConfig:
    return parse_config(values_of("small", model={"name_or_path": str(folder), "gguf_file": file}))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_has_the_weights_tokens_and_ends_that_the_file_stands_for(
    kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    expected, tokenizer = write_llama(tmp_path / FILE, kind)
    keys = with_checkpoint(_config(tmp_path), print).model
    assert keys.gguf_file is None
    check_adapter(keys)
    found = AutoModelForCausalLM.from_pretrained(keys.name_or_path).eval()
    assert not hasattr(found.config, "quantization_config")
    own = expected.state_dict()
    assert found.state_dict().keys() == own.keys()
    for name, weights in found.state_dict().items():
        torch.testing.assert_close(weights, own[name], rtol=0, atol=0, msg=name)
    ids = torch.randint(0, 300, (2, 90))
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, expected(ids).logits)
    read, positions = load_tokenizer_and_context(keys)
    assert positions == 128
    for text in ("what is 12+34?  I'm", "héllo</s>there"):
        assert read(text)["input_ids"] == [1, *tokenizer.encode(text).ids]
    assert read.chat_template == TEMPLATE
    assert (read.bos_token, read.eos_token) == ("<s>", "</s>")
    assert GenerationConfig.from_pretrained(keys.name_or_path).eos_token_id == [2, 3]


@pytest.mark.slow
def test_a_file_is_converted_once_by_its_content_and_again_after_a_kill(
    tmp_path: Path, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write_llama(tmp_path / "a" / FILE)
    write = base_model._write_checkpoint

    def write_and_die(file: Path, folder: Path) -> None:
        write(file, folder)
        (folder / "tokenizer.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(base_model, "_write_checkpoint", write_and_die)
    with pytest.raises(KeyboardInterrupt):
        with_checkpoint(_config(tmp_path / "a"), print)
    monkeypatch.undo()
    monkeypatch.setenv("GRPO_STORAGE", str(storage))
    said: list[str] = []
    first = with_checkpoint(_config(tmp_path / "a"), said.append)
    AutoTokenizer.from_pretrained(first.model.name_or_path)
    origin = json.loads((Path(first.model.name_or_path) / ORIGIN).read_text())
    assert origin["file"] == str(tmp_path / "a" / FILE)
    assert origin["content"] == content_hash(origin["file"])
    assert (origin["date"], origin["transformers"]) == (date.today().isoformat(), transformers.__version__)
    (tmp_path / "a" / FILE).rename(tmp_path / "b" / FILE)
    assert with_checkpoint(_config(tmp_path / "b"), said.append) == first
    assert with_checkpoint(first, said.append) == first
    assert len(said) == 1
    assert [*(storage / "bases").iterdir()] == [Path(first.model.name_or_path)]


def test_who_comes_while_a_file_is_converted_waits_and_takes_what_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FILE).write_bytes(b"content")
    lock, asked, found, written = fcntl.flock, threading.Semaphore(0), list[RunConfig](), list[Path]()

    def ask(descriptor: int, operation: int) -> None:
        asked.release()
        lock(descriptor, operation)

    def convert() -> None:
        found.append(with_checkpoint(_config(tmp_path), print))

    def write(file: Path, folder: Path) -> None:
        if not written:
            second.start()
            assert asked.acquire(timeout=60) and asked.acquire(timeout=60), "the second did not ask for the lock"
        written.append(folder)
        folder.mkdir()

    second = threading.Thread(target=convert)
    monkeypatch.setattr(base_model.fcntl, "flock", ask)
    monkeypatch.setattr(base_model, "_write_checkpoint", write)
    convert()
    second.join()
    assert len(written) == 1
    assert found[0] == found[1]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architecture": "plamo"}, "architecture plamo is not supported"),
    "positions by a tensor": (
        {"extra": {"rope_freqs.weight": np.ones(8, np.float32)}},
        r"scales its rotary positions \(rope_freqs.weight\)",
    ),
    "positions by a field": (
        {"fields": {"llama.rope.scaling.type": "yarn"}},
        r"positions \(rope.scaling.type = 'yarn'\), which transformers does not read",
    ),
    "more weights": (
        {"extra": {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}},
        r"it holds ([\d,]+) weights, and the LlamaForCausalLM that .* makes of it (?!\1)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_is_not_read_whole_is_refused_by_name(case: str, tmp_path: Path, storage: Path) -> None:
    made, said = REFUSED[case]
    write_llama(tmp_path / FILE, **made)
    with pytest.raises(ConfigError, match=said) as refused:
        with_checkpoint(_config(tmp_path), print)
    assert str(tmp_path / FILE) in str(refused.value)
    assert not [it for it in (storage / "bases").iterdir() if not it.name.endswith(".partial")]


def test_a_quantisation_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    write_llama(tmp_path / FILE, extra={"blk.0.other": np.ones((2, 32), np.int8)})
    with pytest.raises(ConfigError, match=r"cannot read it: Dequantization for I8"):
        with_checkpoint(_config(tmp_path), print)


def test_a_file_that_is_not_there_or_cannot_be_read_here_is_refused_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FILE).touch()
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "of another"}}')
    check_adapter(_config(tmp_path).model)
    with pytest.raises(ConfigError, match=rf"gguf_file = 'other.gguf': no such file in .*, which has {FILE}"):
        check_adapter(_config(tmp_path, "other.gguf").model)
    with pytest.raises(ConfigError, match="gguf_file"):
        _config(tmp_path, "small.bin")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package gguf, not installed here: pip install .*\[gguf\]"):
        check_adapter(_config(tmp_path).model)


def test_what_is_not_on_this_machine_is_left_to_the_run(tmp_path: Path) -> None:
    """`grpo plan` downloads nothing."""
    config = parse_config(values_of("far", model={"name_or_path": "nobody/nothing", "gguf_file": FILE}))
    assert with_checkpoint(config, print, download=False) is config
    assert ModelConfig(name_or_path="x").gguf_file is None
