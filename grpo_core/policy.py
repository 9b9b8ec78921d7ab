"""The policy: load the model, LoRA, and the log-probabilities of completions under it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_core.batching import Sequences
from grpo_core.sections import ModelConfig


def load_model(path: Path | str, revision: str | None = None) -> Any:
    """A causal LM with float32 weights, dropout off: the ratio of an on-policy update must be exactly 1."""
    return AutoModelForCausalLM.from_pretrained(path, revision=revision, dtype=torch.float32).eval()


def with_adapter(model: Any, config: ModelConfig) -> Any:
    """The model under a LoRA adapter (arXiv:2106.09685) where the configuration asks for one; the base is frozen.

    The adapter starts as no change at all. Its input side is drawn from torch's global random state.
    """
    if not config.use_peft:
        return model
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules=config.lora_target_modules or "all-linear",
    )
    return get_peft_model(model, adapter).eval()


def without_adapter(model: Any) -> AbstractContextManager[None]:
    """The base model for the length of a `with`: the reference policy of a LoRA training, with no second copy."""
    return model.disable_adapter()


def trainable_state(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that training moves, by name: all of them, or the adapter's."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def load_trainable_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Copy what `trainable_state` gave into the model."""
    own = trainable_state(model)
    if own.keys() != state.keys():
        raise ValueError(f"the saved parameters are others than the model's: {sorted(own.keys() ^ state.keys())[:5]}")
    for name, parameter in own.items():
        parameter.copy_(state[name])


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model that transformers and vLLM load as it is; an adapter is merged into its base, in place."""
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Policy(nn.Module):
    """A causal LM whose forward gives what the loss needs."""

    def __init__(self, model: Any, temperature: float, *, gradient_checkpointing: bool = False):
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.checkpointed = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        if gradient_checkpointing:
            if not self.checkpointed:
                raise ValueError(
                    f"gradient_checkpointing=true: {type(model).__name__} has no layers that transformers can "
                    "recompute; turn it off"
                )
            model.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, sequences: Sequences, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probability of each completion token, at the sampling temperature, and the entropy there. 2 × (B, T)

        float32 whatever the model's dtype; entries past a completion's end are meaningless. The entropy carries a
        gradient only when asked to.
        """
        ids, prompt_lengths = sequences.input_ids, sequences.prompt_lengths
        first = int(prompt_lengths.min()) - 1  # the position that predicts the earliest completion token
        with self._checkpointing():
            logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=ids.shape[1] - first).logits[:, :-1]
        logits = logits.float() / self.temperature  # (B, L - first - 1, V)
        logprobs = logits.log_softmax(-1)
        chosen = logprobs.gather(2, ids[:, first + 1 :, None]).squeeze(2)
        with nullcontext() if entropy_gradient else torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        offset = torch.arange(sequences.num_completion_tokens, device=ids.device)
        columns = (prompt_lengths[:, None] - 1 - first + offset).clamp(max=chosen.shape[1] - 1)  # (B, T)
        return chosen.gather(1, columns), entropy.gather(1, columns)

    @contextmanager
    def _checkpointing(self) -> Iterator[None]:
        """transformers recomputes activations only in layers in training mode; their parts stay in evaluation mode, so
        that no dropout comes on. Outside, sampling with the same model needs the layers' key-value cache, which
        recomputing turns off."""
        for layer in self.checkpointed:
            layer.training = torch.is_grad_enabled()
        try:
            yield
        finally:
            for layer in self.checkpointed:
                layer.training = False
