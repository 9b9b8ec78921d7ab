"""How a model version answers in MLflow: as it was evaluated.

A copy of this file lies in each version, and MLflow runs it there (models from code), so it imports nothing of this
project. Its settings, and the defaults of its parameters, stand in the version's file MLmodel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import mlflow
import pandas as pd
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig


class AnsweringModel(mlflow.pyfunc.PythonModel):
    """Answers texts, or conversations (lists of messages), one after the other, each as if it were alone."""

    def load_context(self, context: Any) -> None:
        folder, self.settings = context.artifacts["model"], context.model_config
        on_gpu, precision = torch.cuda.is_available(), self.settings["precision"]
        half = precision == "bf16" or (precision == "auto" and on_gpu and torch.cuda.get_device_capability() >= (8, 0))
        # Fused attention would ignore a cap on attention's scores (Gemma 2).
        capped = getattr(
            AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config(),
            "attn_logit_softcapping",
            None,
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            trust_remote_code=False,
            dtype=torch.bfloat16 if half else torch.float32,
            attn_implementation="eager" if capped else None,
        )
        self.model.to("cuda" if on_gpu else "cpu").eval()
        self.tokenizer = tokenizer
        own, end = self.model.generation_config.eos_token_id, tokenizer.eos_token_id
        ends = {*(own if isinstance(own, list) else [own]), end} - {None}
        # What else the base's generation_config says, such as a temperature, was not evaluated.
        self.model.generation_config = GenerationConfig(
            eos_token_id=sorted(ends) or None, pad_token_id=next(iter(sorted(ends)), 0)
        )

    def predict(self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> list[str]:
        column = model_input.columns[0]  # MLflow passes on no further ones
        if column not in (0, "prompt", "messages"):
            raise ValueError(f"the first column is {column!r}: give prompts as a list, or in a first column 'prompt'")
        variables = json.loads(self.settings["template"])
        return [self.complete(self.prompt_ids(each, variables), params or {})[0] for each in model_input[column]]

    @torch.inference_mode()
    def complete(self, ids: Sequence[int], asked: Mapping[str, Any]) -> tuple[str, int, bool]:
        """The text that follows these tokens, its number of tokens, and whether it has come to its end."""
        sampling: dict[str, Any] = {"do_sample": False}
        if asked["temperature"] > 0:
            sampling = {"do_sample": True, **{key: asked[key] for key in ("temperature", "top_p", "top_k")}}
        stop, limit = [*asked["stop"]], int(asked["max_new_tokens"])
        rows = torch.tensor([ids], device=self.model.device)
        [row] = self.model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            max_new_tokens=limit,
            **sampling,
            **({"stop_strings": stop, "tokenizer": self.tokenizer} if stop else {}),
        ).tolist()
        completion = row[len(ids) :]
        text = self.text(ids, completion)
        end = min((at for each in stop if (at := text.find(each)) >= 0), default=len(text))
        ends = self.model.generation_config.eos_token_id or []
        return text[:end], len(completion), len(completion) < limit or end < len(text) or completion[-1] in ends

    def prompt_ids(self, prompt: Any, variables: Mapping[str, Any]) -> list[int]:
        """Tokens of a text, or of messages with these variables of the chat template."""
        if not self.settings["conversational"]:
            return self.tokenizer(prompt)["input_ids"]
        messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
        if (system := self.settings["system_prompt"]) and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        encoded = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, **variables
        )
        return encoded["input_ids"]

    def text(self, prompt: Sequence[int], completion: Sequence[int]) -> str:
        """The text that continues the prompt: alone, a completion may lose the space that it begins with."""
        alone = self.tokenizer.decode(completion, skip_special_tokens=True)
        if self.settings["conversational"]:
            return alone
        before, whole = (
            self.tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, [*prompt, *completion])
        )
        return whole.removeprefix(before) if whole.startswith(before) else alone


mlflow.models.set_model(AnsweringModel())
