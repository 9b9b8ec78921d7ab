"""GGUF files as llama.cpp's converter writes them, of small random models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

TEXTS = ["what is 12 + 34? the sum of both is 46", "hello there, how are you? I'm well, and you?"] * 4
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}<s>assistant:"
SPECIAL = ["<unk>", "<s>", "</s>", "<turn>"]
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def byte_tokenizer() -> Tokenizer:
    """A small byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return tokenizer


def write_llama(
    file: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
    architecture: str = "llama",
    extra: dict[str, np.ndarray] | None = None,
    fields: dict[str, str] | None = None,
) -> tuple[Any, Tokenizer]:
    """Write a random Llama, its matrices of this kind; returns the model that the file stands for, and its
    tokenizer."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_theta=5000.0,
        rms_norm_eps=1e-5,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    writer = GGUFWriter(file, architecture)
    writer.add_name("small")
    writer.add_context_length(128)
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in _merges(tokenizer)])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)
    for name, value in (fields or {}).items():
        writer.add_string(name, value)
    for name, weights in model.named_parameters():
        values = weights.detach().numpy()
        if values.ndim == 2:
            coded = quants.quantize(values, kind)
            with torch.no_grad():
                weights.copy_(torch.from_numpy(quants.dequantize(coded, kind)))
            coded = quants.quantize(_paired(values, name, config), kind)  # rows move whole, with their blocks
            writer.add_tensor(_name(name), coded, raw_dtype=kind)
        else:
            writer.add_tensor(_name(name), values.astype(np.float32))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, tokenizer


def _merges(tokenizer: Tokenizer) -> list[list[str]]:
    return json.loads(tokenizer.to_str())["model"]["merges"]


def _name(name: str) -> str:
    """A weight's name in GGUF."""
    fixed = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    module, _, last = name.rpartition(".")
    if module in fixed:
        return f"{fixed[module]}.{last}"
    _, _, layer, own = module.split(".", 3)
    return f"blk.{layer}.{LAYER[own]}.{last}"


def _paired(values: np.ndarray, name: str, config: LlamaConfig) -> np.ndarray:
    """llama.cpp turns neighbours by the rotary embedding where transformers turns halves."""
    if "q_proj" not in name and "k_proj" not in name:
        return values
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, values.shape[1])
    return halves.swapaxes(1, 2).reshape(values.shape)
