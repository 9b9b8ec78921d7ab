"""What an update costs, counted: floating-point operations, bytes between processes, bytes to the device.

The least operations that an update needs, by hand, for rows with a gradient (2 operations are one multiplication and
one addition). A decoder computes each distinct prompt once and each completion except its last token: forward 2 per
weight, backward 2 for the input's gradient and 2 for the weight's. The output layer is applied to completion tokens
only; if their logits are not kept, they are made once more: 8 per weight instead of 6. Attention multiplies each query
by the keys that it attends to, and the probabilities by their values: 4 · heads · head size per pair forward, 8
backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from grpo_core.config.files import parse_config
from grpo_core.model import logprobs, packed_attention, to_device
from grpo_core.model.loading import load_model
from grpo_core.model.policy import Policy
from grpo_core.model.sequences import Sequences
from grpo_core.training import batch as batches
from grpo_core.training.batch import MicroBatch
from grpo_core.training.out_of_memory import OutOfMemoryRetry
from grpo_core.training.state import TrainingState
from grpo_core.training.update import update
from tests.conftest import config_values, make_model
from tests.held import held

PROMPTS, G = 32, 8
VOCABULARY, HIDDEN, LAYERS = 500, 64, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Attention is about as small a part of the operations as in a model of 0.5B with sequences of 500 tokens."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 1024, "num_hidden_layers": LAYERS}
    return make_model(tmp_path_factory.mktemp("model"), **sizes)


@pytest.fixture
def policy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Policy]:
    # The fused attention of a CPU is not among the operations that torch counts, its plain products are.
    monkeypatch.setattr(packed_attention, "SHORT", {torch.float32: 1000})
    PartialState()
    yield Policy(load_model(folder), 1.0)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def batch() -> MicroBatch:
    """An update over all processes: prompts of 4 to 12 tokens, completions of 10 to 40, every third group silent."""
    torch.manual_seed(0)
    rows = PROMPTS * G
    prompts = torch.randint(4, 13, (PROMPTS,)).repeat_interleave(G)
    completions = torch.randint(10, 41, (rows,))
    mask = (torch.arange(int(completions.max())) < completions[:, None]).float()
    advantages = torch.randn(rows)
    advantages[torch.arange(rows) // G % 3 == 0] = 0.0
    ids = torch.randint(VOCABULARY, (rows, int((prompts + completions).max())))
    return MicroBatch(
        sequences=Sequences(ids, prompts, completions, torch.arange(rows) // G),
        mask=mask,
        weights=mask / mask.sum(),
        advantages=advantages,
        sampling_logprobs=torch.zeros_like(mask),
        old_logprobs=None,
        ref_logprobs=None,
        keep=None,
        entropy_weights=mask / mask.sum(),
    )


def _least(policy: Policy, batch: MicroBatch, head: int) -> tuple[int, int]:
    """Operations with weights, and those of attention. `head`: of the output layer per weight and token."""
    sequences, trained = batch.sequences, batch.advantages != 0
    prompts = sequences.prompt_lengths[trained]
    firsts = prompts[::G]  # whole groups are silent or not
    completions = sequences.completion_lengths[trained]
    tokens = int(firsts.sum() + (completions - 1).sum())
    inputs = completions - 1
    pairs = int((firsts * (firsts + 1) // 2).sum() + (inputs * prompts + inputs * (inputs + 1) // 2).sum())
    weights = sum(p.numel() for name, p in policy.model.named_parameters() if "proj" in name and p.ndim == 2)
    return 6 * weights * tokens + head * VOCABULARY * HIDDEN * int(completions.sum()), 12 * LAYERS * HIDDEN * pairs


class Reduced(TorchDispatchMode):
    """Bytes that a process gives to all-reduces."""

    bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.c10d.allreduce_.default:
            self.bytes += sum(tensor.nbytes for tensor in args[0])
        return function(*args, **(kwargs or {}))


def _counted(policy: Policy, batch: MicroBatch, process: int, processes: int) -> tuple[int, int, int]:
    """What one process's update costs: operations with weights, those of attention, and bytes that it reduces."""
    session: Any = SimpleNamespace(
        config=parse_config(config_values(Path("model"), Path("data"))),
        accelerator=SimpleNamespace(process_index=process, num_processes=processes, device=torch.device("cpu")),
        policy=policy,
        teacher=None,
        optimizer=torch.optim.SGD(policy.master.parameters()),
        learning_rate=lambda updates: 0.0,
        memory=OutOfMemoryRetry(1000, policy),  # several passes
    )
    state = held(PartialState._shared_state, {"num_processes": processes})  # accelerate asks the launcher alone
    with state, Reduced() as reduced, FlopCounterMode(display=False) as counter:
        update(session, batch, TrainingState(tokens_per_pass=1000))
    of_attention = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
    return counter.get_total_flops() - of_attention, of_attention, reduced.bytes


@pytest.fixture
def processes(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process group of this size, of which this process alone exists."""
    if request.param > 1:
        PartialState().num_processes = request.param
        torch.distributed.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    if request.param > 1:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "kept", "head"),
    [(1, 2**25, 6), (8, 0, 8), *(pytest.param(n, 0, 8, marks=pytest.mark.e2e) for n in (1, 2))],
    indirect=["processes"],
)
def test_an_update_computes_each_token_once(
    policy: Policy, batch: MicroBatch, processes: int, kept: int, head: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all processes. What is more: prompts whose group is divided among passes or processes, and in attention the
    padding and the keys after a query, which a CPU computes too."""
    monkeypatch.setattr(logprobs, "KEPT_LOGITS", kept)
    found = [_counted(policy, batch, process, processes) for process in range(processes)]
    with_weights, in_attention, _ = (sum(counts) for counts in zip(*found, strict=True))
    least_with_weights, least_in_attention = _least(policy, batch, head)
    assert 1 <= with_weights / least_with_weights <= 1.02
    assert (with_weights + in_attention) / (least_with_weights + least_in_attention) <= 1.05
    mean = with_weights / processes
    assert all(abs(counts[0] - mean) <= 0.05 * mean for counts in found)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 8], indirect=True)
def test_an_update_reduces_four_bytes_per_parameter(policy: Policy, batch: MicroBatch, processes: int) -> None:
    parameters = [*policy.master.parameters()]
    flags = 4 * len(parameters)  # which of them have a gradient
    expected = 4 * sum(p.numel() for p in parameters) + flags if processes > 1 else 0
    assert _counted(policy, batch, 0, processes)[2] == expected


def test_an_update_moves_some_tens_of_bytes_per_token_to_the_device(
    policy: Policy, batch: MicroBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []

    def move(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
        moved.append(sum(tensor.nbytes for tensor in tensors))
        return [*tensors]

    monkeypatch.setattr(to_device, "move", move)
    monkeypatch.setattr(batches, "move", move)
    policy.attention = "varlen"
    policy.prepare(batch.sequences)
    batch.to(torch.device("cpu"))
    assert sum(moved) / int(batch.mask.sum()) < 100
