"""A model whose weights two processes share equally, unequally, or not at all."""

from __future__ import annotations

import torch


def shared_model() -> torch.nn.Module:
    """Shares of two processes: blocks as in the whole; float32 in one process only; none in the second process."""
    torch.manual_seed(0)
    model = torch.nn.Module()
    for name, shape in {"even": (128, 128), "uneven": (129, 64), "one_row": (1, 8192)}.items():
        model.register_parameter(name, torch.nn.Parameter(torch.randn(shape)))
    return model


def step_at_random(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.manual_seed(step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape)
        if hasattr(parameter, "device_mesh"):
            distribute = torch.distributed.tensor.distribute_tensor
            gradient = distribute(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = gradient
    optimizer.step()
