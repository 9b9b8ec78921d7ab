"""Decoding with transformers' own cache, for models whose attention is not the plain one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache


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
        self.cache: Any = DynamicCache()

    def prefill(self) -> Tensor:
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        logits = self._step(self.input_ids, positions)
        self.cache.batch_select_indices(self.group)
        self.mask, self.positions = self.mask[self.group], positions[self.group, -1]
        return logits[self.group]

    def decode(self, token: Tensor) -> Tensor:
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
        self.positions = self.positions + 1
        return self._step(token[:, None], self.positions[:, None])

    def keep(self, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows.nonzero().flatten())
        self.mask, self.positions = self.mask[rows], self.positions[rows]

    def join(self, other: PlainCache) -> None:
        """Append the completions of another cache, padded on the left to the same width."""
        unused = int(self.mask.any(0).int().argmax())  # columns that are padding everywhere
        width = max(self.mask.shape[1] - unused, other.mask.shape[1])

        def both(mine: Tensor, theirs: Tensor) -> Tensor:
            return torch.cat([nn.functional.pad(x, (0, 0, width - x.shape[2], 0)) for x in (mine, theirs)])

        for layer, new in zip(self.cache.layers, other.cache.layers, strict=True):
            layer.keys, layer.values = both(layer.keys, new.keys), both(layer.values, new.values)
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
