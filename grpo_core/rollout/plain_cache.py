"""Decoding with transformers' own cache, for models whose attention is not the plain one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

STATES = {"conv", "linear_attention"}  # kinds of layers that carry a state, whose padding transformers masks


class PlainCache:
    """Cache with the methods of `GroupCache`; it has one row per completion, padded on the left."""

    def __init__(self, model: Any, prompts: list[list[int]], copies: list[int], max_tokens: int, pad_id: int):
        self.model, device = model, model.device
        width = max(map(len, prompts))
        padding = [width - len(ids) for ids in prompts]
        self.mask = torch.tensor([[0] * n + [1] * (width - n) for n in padding], device=device)
        self.input_ids = torch.tensor([[pad_id] * n + ids for n, ids in zip(padding, prompts, strict=True)])
        self.input_ids = self.input_ids.to(device)
        self.group = torch.arange(len(prompts), device=device).repeat_interleave(torch.tensor(copies, device=device))
        # Only where layers carry a state: by its configuration, it would keep no more than a window's keys.
        carries = STATES & {*(getattr(model.config.get_text_config(), "layer_types", None) or ())}
        self.cache: Any = DynamicCache(config=model.config) if carries else DynamicCache()

    def prefill(self) -> Tensor:
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        logits = self._step(self.input_ids, positions)
        self.cache.reorder_cache(self.group)
        self.mask, self.positions = self.mask[self.group], positions[self.group, -1]
        return logits[self.group]

    def decode(self, token: Tensor) -> Tensor:
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
        self.positions = self.positions + 1
        return self._step(token[:, None], self.positions[:, None])

    def keep(self, rows: Tensor) -> None:
        self.cache.reorder_cache(rows.nonzero().flatten())
        self.mask, self.positions = self.mask[rows], self.positions[rows]

    def join(self, other: PlainCache) -> None:
        """Append the completions of another cache, padded on the left to the same width."""
        unused = int(self.mask.any(0).int().argmax())  # columns that are padding everywhere
        width = max(self.mask.shape[1] - unused, other.mask.shape[1])

        def both(mine: Tensor, theirs: Tensor) -> Tensor:
            return torch.cat([nn.functional.pad(x, (0, 0, width - x.shape[2], 0)) for x in (mine, theirs)])

        for layer, new in zip(self.cache.layers, other.cache.layers, strict=True):
            if getattr(layer, "keys", None) is not None:
                layer.keys, layer.values = both(layer.keys, new.keys), both(layer.values, new.values)
            for name in ("conv_states", "recurrent_states"):
                own, theirs = getattr(layer, name, {}), getattr(new, name, {})
                own |= {place: torch.cat([state, theirs[place]]) for place, state in own.items() if state is not None}
        masks = (self.mask, other.mask)
        self.mask = torch.cat([nn.functional.pad(mask, (width - mask.shape[1], 0)) for mask in masks])
        self.positions = torch.cat([self.positions, other.positions])

    def _step(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        output = self.model(
            input_ids=input_ids,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()
