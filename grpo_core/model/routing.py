"""The experts that a mixture's routers choose: read, compared with those of another pass, or replaced by them.

Routers are the modules whose logits transformers records as a model's `router_logits`. A choice is read, and replaced,
where a router makes it: in its call of `topk` over all experts. So what a router makes of its choice (gate weights by
softmax or sigmoid, over groups or with a bias) is its own, and follows from its own logits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from grpo_core.errors import ConfigError
from grpo_core.model.capabilities import decoder, random_ids
from grpo_core.model.sharded import call_as_forward

TOPK = (torch.topk, Tensor.topk)
TRIED = 4  # tokens on which the routers are found out about

Seen = dict[int, tuple[Tensor, Tensor]]  # by the router's place: logits (N, E), and the K chosen experts (N, K)


@dataclass
class Routers:
    """The L routers of a mixture, each of which chooses K of E experts per token. `layers`: the decoder's layers that
    they are in. `seen` and `taken` are set inside of `reading`, for one pass and what it computes again."""

    model: str
    layers: list[int]
    experts: int = 0
    chosen: int = 0
    given_at: int | None = None  # place of the choice in what a router gives, if it is there
    seen: Seen | None = None
    taken: Tensor | None = None  # (L, N, K) experts to take instead of those that the routers choose

    @property
    def width(self) -> int:
        """Experts that a token takes in all layers, L · K."""
        return len(self.layers) * self.chosen


def routers_of(model: Any, asking: Sequence[str] = ()) -> Routers | None:
    """Let the routers of a model be read by `reading`; None if it has none. Not undone: outside of it nothing changes.
    Raises ConfigError if they do not choose among all experts in a way that can be read, or if there are none and keys
    of `algorithm` are `asking` for them."""
    inner = decoder(model)
    found = _recorded(inner)
    if not found and asking:
        raise ConfigError(
            f"algorithm.{asking[0]} is for mixtures of experts, and {type(model).__name__} has no routers that "
            f"transformers names: remove {' and '.join(asking)}, or choose another mixture"
        )
    if not found:
        return None
    first: Any = found[0][1].forward
    if getattr(first, "func", None) is _forward:  # by the policy, whose model samples too
        return first.args[0]
    routers = Routers(type(model).__name__, [int(re.findall(r"\d+", name)[0]) for name, _, _ in found])
    for place, (_, module, index) in enumerate(found):
        module.forward = partial(_forward, routers, place, index, module.forward)
    ids = random_ids(model, (1, TRIED)).to(model.device)
    with torch.no_grad(), reading(routers) as seen:
        call_as_forward(model, lambda ids: inner(input_ids=ids, use_cache=False), ids)
    shapes = {(logits.shape[1], chosen.shape[1]) for logits, chosen in seen.values()}
    if len(shapes) > 1 or len(seen) < len(found) or len(set(routers.layers)) < len(found):
        raise _unreadable(routers, "its layers do not have one router each, with the same number of experts")
    ((routers.experts, routers.chosen),) = shapes
    return routers


@contextmanager
def reading(routers: Routers | None, taken: Tensor | None = None) -> Iterator[Seen]:
    """Inside, for one pass and its backward pass, the routers' logits and choices are noted, and the experts `taken`
    (N, L · K) are used instead of those that they choose. Without routers, nothing is noted."""
    seen: Seen = {}
    if routers is None:
        yield seen
        return
    routers.seen = seen
    if taken is not None and taken.shape[1] != routers.width:
        raise ConfigError(
            f"the recorded completions have {taken.shape[1]} experts per token, and {routers.model} chooses "
            f"{routers.width}: they are another model's. Set algorithm.routing_replay to false"
        )
    if taken is not None:
        routers.taken = taken.long().unflatten(1, (len(routers.layers), -1)).transpose(0, 1)
    try:
        yield seen
    finally:
        routers.seen = routers.taken = None


def choices(seen: Seen) -> Tensor:
    """The experts that each token's routers chose, as they are kept with a completion. (N, L · K) int16"""
    return torch.cat([seen[place][1] for place in sorted(seen)], dim=1).to(torch.int16)


def difference(seen: Seen, others: Tensor) -> Tensor:
    """Share of a token's layers whose set of chosen experts is not that of the others, (N, L · K). (N,)"""
    found, expected = (each.unflatten(1, (len(seen), -1)).sort(-1).values for each in (choices(seen), others))
    return (found != expected).any(-1).float().mean(-1)


def choice_counts(seen: Seen, at: Tensor, weights: Tensor, experts: int) -> Tensor:
    """How often the routers themselves choose each expert for the tokens at these places, (n,), over all layers, also
    where other experts are taken. (E,)"""
    counts = torch.zeros(experts, dtype=torch.float64, device=at.device)
    for _, chosen in seen.values():
        counts.index_add_(0, chosen[at].flatten(), weights.double().repeat_interleave(chosen.shape[1]))
    return counts


def balance_loss(seen: Seen, at: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """A pass's part of E · Σ_e f_e P_e, the load-balancing loss of Switch Transformers (arXiv:2101.03961) in the form
    of transformers: f and P are over all layers, and here over all tokens of an update that the loss is on.

    f_e: how often expert e is chosen, per token and layer; P_e: its mean probability, by a softmax of the routers'
    logits. `counts`: `choice_counts` of the update, (E,); `at`, `weights`: of the pass, as there.
    """
    probabilities = torch.stack([weights @ logits[at].float().softmax(-1) for logits, _ in seen.values()]).sum(0)
    tokens = (counts.sum() / seen[0][1].shape[1]).clamp(min=1)  # times layers
    return len(counts) * (counts.float() @ probabilities) / tokens.float().square()


class _Choice(TorchFunctionMode):
    """Inside, choices by `topk` are noted, and one among all `experts` is replaced by those to be taken, if any."""

    def __init__(self, experts: int, taken: Tensor | None):
        super().__init__()
        self.experts, self.taken = experts, taken
        self.noted: list[tuple[torch.Size, Tensor]] = []  # shape of what was chosen among, and the choice

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in TOPK:
            return found
        self.noted.append((args[0].shape, found.indices))
        if self.taken is None or args[0].shape != (len(self.taken), self.experts):
            return found
        return torch.return_types.topk((args[0].gather(1, self.taken), self.taken))


def _forward(routers: Routers, place: int, index: int, own: Callable[..., Any], *arguments: Any, **keys: Any) -> Any:
    """A router's forward pass; what is computed again for a backward pass is not noted again."""
    if routers.seen is None:
        return own(*arguments, **keys)
    if routers.given_at is not None and routers.taken is None:  # watching `topk` costs time in each step of sampling
        output = own(*arguments, **keys)
        routers.seen.setdefault(place, (output[index].flatten(0, -2), output[routers.given_at]))
        return output
    with _Choice(routers.experts, None if routers.taken is None else routers.taken[place]) as choice:
        output = own(*arguments, **keys)
    if place not in routers.seen:
        logits = (output[index] if isinstance(output, tuple) else output).flatten(0, -2)
        among_all = [chosen for shape, chosen in choice.noted if shape == logits.shape]
        if len(among_all) != 1:
            raise _unreadable(routers, f"a router does not take one topk among all {logits.shape[1]}")
        routers.seen[place] = logits, among_all[0]
        if not routers.experts and isinstance(output, tuple):
            routers.given_at = next((at for at, it in enumerate(output) if it is among_all[0]), None)
    return output


def _unreadable(routers: Routers, why: str) -> ConfigError:
    return ConfigError(
        f"the experts that {routers.model} chooses cannot be read, since {why}: set "
        "algorithm.router_aux_loss_coef to 0 and algorithm.routing_replay to false, or choose another model"
    )


def _recorded(inner: nn.Module) -> list[tuple[str, Any, int]]:
    """Name and module of each whose output transformers records as the model's router_logits, and their place in it."""
    recorders = (getattr(inner, "_can_record_outputs", None) or {}).get("router_logits", [])
    return [
        (name, part, getattr(recorder, "index", 0))
        for name, part in inner.named_modules()
        for recorder in (recorders if isinstance(recorders, list) else [recorders])
        if isinstance(part, getattr(recorder, "target_class", recorder))
        and (getattr(recorder, "layer_name", None) or "") in name
    ]
