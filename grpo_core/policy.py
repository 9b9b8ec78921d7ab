"""The policy: load model and tokenizer, and the log-probabilities of completions under it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_core.batching import Sequences
from grpo_core.sections import ModelConfig


def load_tokenizer(config: ModelConfig) -> Any:
    """The model's tokenizer."""
    return AutoTokenizer.from_pretrained(config.name_or_path, revision=config.revision)


def load_model(path: Path | str, revision: str | None = None) -> Any:
    """A causal LM with float32 weights, dropout off: the ratio of an on-policy update must be exactly 1."""
    return AutoModelForCausalLM.from_pretrained(path, revision=revision, dtype=torch.float32).eval()


class Policy(nn.Module):
    """A causal LM whose forward gives what the loss needs; a module, so that Accelerate can wrap it as a whole."""

    def __init__(self, model: Any, temperature: float):
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Log-probability of each completion token, at the sampling temperature, and the entropy there. 2 × (B, T)

        float32 whatever the model's dtype; entries past a completion's end are meaningless. The entropy carries no
        gradient.
        """
        ids, prompt_lengths = sequences.input_ids, sequences.prompt_lengths
        first = int(prompt_lengths.min()) - 1  # the position that predicts the earliest completion token
        logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=ids.shape[1] - first).logits[:, :-1]
        logits = logits.float() / self.temperature  # (B, L - first - 1, V)
        logprobs = logits.log_softmax(-1)
        chosen = logprobs.gather(2, ids[:, first + 1 :, None]).squeeze(2)
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        offset = torch.arange(sequences.num_completion_tokens, device=ids.device)
        columns = (prompt_lengths[:, None] - 1 - first + offset).clamp(max=chosen.shape[1] - 1)  # (B, T)
        return chosen.gather(1, columns), entropy.gather(1, columns)
