"""How a model version answers in MLflow: as it was evaluated.

A copy of this file lies in each version, and MLflow runs it there (models from code), so it imports nothing of this
project. Its settings, and the defaults of its parameters, stand in the version's file MLmodel.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import mlflow
import pandas as pd
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, GenerationConfig


class AnsweringModel(mlflow.pyfunc.PythonModel):
    """Answers texts, or conversations (lists of messages), one after the other, each as if it were alone. Images stand
    in messages as OpenAI has them: parts `image_url` with a data: URL."""

    def load_context(self, context: Any) -> None:
        folder, self.settings = context.artifacts["model"], context.model_config
        on_gpu, precision = torch.cuda.is_available(), self.settings["precision"]
        half = precision == "bf16" or (precision == "auto" and on_gpu and torch.cuda.get_device_capability() >= (8, 0))
        # Fused attention would ignore a cap on attention's scores (Gemma 2).
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        reads_images = self.settings.get("images") or type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        kind = transformers.AutoModelForImageTextToText if reads_images else transformers.AutoModelForCausalLM
        self.processor = _processor(folder, config, tokenizer) if self.settings.get("images") else None
        self.model: Any = kind.from_pretrained(
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
        return [self.complete(self.encode(each, variables), params or {})[0] for each in model_input[column]]

    @torch.inference_mode()
    def complete(self, prompt: Mapping[str, Tensor], asked: Mapping[str, Any]) -> tuple[str, int, bool]:
        """The text that follows an encoded prompt, its number of tokens, and whether it has come to its end."""
        sampling: dict[str, Any] = {"do_sample": False}
        if asked["temperature"] > 0:
            sampling = {"do_sample": True, **{key: asked[key] for key in ("temperature", "top_p", "top_k")}}
        stop, limit = [*asked["stop"]], int(asked["max_new_tokens"])
        ids = prompt["input_ids"][0].tolist()
        [row] = self.model.generate(
            **{name: self._placed(tensor) for name, tensor in prompt.items()},
            max_new_tokens=limit,
            **sampling,
            **({"stop_strings": stop, "tokenizer": self.tokenizer} if stop else {}),
        ).tolist()
        completion = row[len(ids) :]
        text = self.text(ids, completion)
        end = min((at for each in stop if (at := text.find(each)) >= 0), default=len(text))
        ends = self.model.generation_config.eos_token_id or []
        return text[:end], len(completion), len(completion) < limit or end < len(text) or completion[-1] in ends

    def encode(self, prompt: Any, variables: Mapping[str, Any]) -> dict[str, Tensor]:
        """What the model reads of a text, or of messages with these variables of the chat template; (1, tokens) ids."""
        if not self.settings["conversational"]:
            return _alone(self.tokenizer(prompt)["input_ids"])
        messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
        if (system := self.settings["system_prompt"]) and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        options = {"add_generation_prompt": True, "return_dict": True, "tokenize": True, **variables}
        if self.processor is None:
            return _alone(self.tokenizer.apply_chat_template(messages, **options)["input_ids"])
        given = [{**message, "content": _parts(message.get("content", ""))} for message in messages]
        return {**self.processor.apply_chat_template(given, return_tensors="pt", **options)}

    def _placed(self, tensor: Tensor) -> Tensor:
        moved = tensor.to(self.model.device)
        return moved.to(self.model.dtype) if moved.is_floating_point() else moved

    def text(self, prompt: Sequence[int], completion: Sequence[int]) -> str:
        """The text that continues the prompt: alone, a completion may lose the space that it begins with."""
        alone = self.tokenizer.decode(completion, skip_special_tokens=True)
        if self.settings["conversational"]:
            return alone
        before, whole = (
            self.tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, [*prompt, *completion])
        )
        return whole.removeprefix(before) if whole.startswith(before) else alone


def _alone(ids: Sequence[int]) -> dict[str, Tensor]:
    rows = torch.tensor([ids])
    return {"input_ids": rows, "attention_mask": torch.ones_like(rows)}


def _processor(folder: str, config: Any, tokenizer: Any) -> Any:
    """The processor, without its part for videos, which transformers makes with torchvision only."""
    names: Any = transformers.models.auto.processing_auto.PROCESSOR_MAPPING_NAMES
    family = getattr(transformers, names[config.model_type])
    parts = [part for part in family.get_attributes() if "video" not in part]
    kind: Any = type(family.__name__, (family,), {"get_attributes": classmethod(lambda cls: parts)})
    images = AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
    values, _ = kind.get_processor_dict(folder)
    processor = kind.from_args_and_dict([images, tokenizer], values)
    processor.chat_template = processor.chat_template or tokenizer.chat_template
    return processor


def _parts(content: Any) -> list[dict[str, Any]]:
    """A message's content as the chat template takes it. Raises ValueError for an image that is not in a data: URL."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [{"type": "image", "image": _opened(it["image_url"])} if it["type"] == "image_url" else it for it in parts]


def _opened(image: Any) -> Any:
    from PIL import Image, ImageOps

    url = image["url"] if isinstance(image, Mapping) else image
    head, _, data = url.partition(",")
    if not head.startswith("data:") or not head.endswith(";base64"):
        raise ValueError(
            f"an image at {url[:60]!r}: give it as a data: URL, base64, which nothing has to be fetched for"
        )
    found: Any = ImageOps.exif_transpose(Image.open(io.BytesIO(base64.b64decode(data))))
    if found.has_transparency_data:
        found = found.convert("RGBA")
        found = Image.alpha_composite(Image.new("RGBA", found.size, "white"), found)
    return found.convert("RGB")


mlflow.models.set_model(AnsweringModel())
