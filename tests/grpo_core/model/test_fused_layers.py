"""A GPU's layers: as exact as torch's own operations, in few operations, which are counted by family."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.command import python_path
from grpo_core.model.fused import attention, kernels

# Operations per layer: of an update's second pass, forward and backward, and of a token step.
COUNTS = {"Llama": (60, 14), "Qwen2": (66, 14), "Qwen3": (70, 16), "Gemma3": (86, 18)}
# Relative: log-probabilities, gradients, and logits of a token step from those of a plain pass.
BOUNDS = {"torch.float32": (1e-6, 1e-5, 3.5e-6), "torch.bfloat16": (0.02, 0.2, 0.1)}


@pytest.fixture(scope="module", params=[*COUNTS, "Phi3"])
def interpreted(request: pytest.FixtureRequest) -> tuple[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.grpo_core.model.interpreting_layers", request.param]
    environment = {**os.environ, "PYTHONPATH": python_path(Path(__file__).parents[3])}
    environment.pop("PYTEST_VERSION")  # shapes are checked elsewhere
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return request.param, json.loads(done.stdout)[request.param]


@pytest.mark.slow
def test_layers_by_kernels_are_exact_in_few_operations_and_what_stays_plain_is_said(
    interpreted: tuple[str, Any],
) -> None:
    family, found = interpreted
    for dtype, bounds in BOUNDS.items():
        assert all(distance < bound for distance, bound in zip(found[dtype], bounds, strict=True)), found[dtype]
    plain = ["Phi3MLP is computed by torch's own operations: it has no gate_proj, up_proj and down_proj"]
    assert found["notes"] == (plain if family == "Phi3" else [])
    (plain_update, update), (_, step) = found["update"], found["token step"]
    assert update <= plain_update / 2
    assert step <= 20
    allowed = COUNTS.get(family, (update, step))
    assert update <= allowed[0] and step <= allowed[1], "a count has risen"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The variants of the kernels that Triton would compile for an H100, instead of running them."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend, noted = make_backend(GPUTarget("cuda", 90, 32)), dict[str, Any]()

    class Noting:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel
            self.bind = create_function_from_signature(kernel.signature, kernel.params, backend)

        def __getitem__(self, grid: Any) -> Any:
            def note(*arguments: Any, **given: Any) -> None:
                bound, specialization, options = self.bind(*arguments, **given)
                options, signature, constants, attributes = self.kernel._pack_args(
                    backend, options, bound, specialization, options
                )
                source = triton.compiler.ASTSource(self.kernel, signature, constants, attributes)
                noted[f"{self.kernel.__name__} {specialization}"] = source

            return note

    for module in (kernels, attention):
        for name, kernel in vars(module).items():
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, Noting(kernel))
    return noted


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_kernel_compiles_for_an_h100_once_for_all_lengths(
    launched: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the compiler and assembler that come with Triton; no GPU is needed. Shapes of Qwen2.5-0.5B."""
    import triton
    from triton.backends.compiler import GPUTarget

    def zeros(*shape: int) -> Any:
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    for tokens in (1, 2, 15, 16, 17, 160):
        out = kernels.Norm.apply(zeros(1, tokens, 896), zeros(896), 1e-6, False)
        turned = kernels.Rotation.apply(
            *(zeros(1, tokens, heads, 64).transpose(1, 2) for heads in (14, 2)), *(zeros(1, tokens, 64) for _ in "cs")
        )
        mixed = kernels.Gated.apply(zeros(1, tokens, 4864), zeros(1, tokens, 4864), "silu")
        torch.autograd.backward([out, *turned, mixed], [torch.zeros_like(x) for x in (out, *turned, mixed)])
        new, held = [zeros(tokens, heads, 64) for heads in (14, 2, 2)], [zeros(tokens, 2, tokens, 64)] * 2
        places = torch.zeros(tokens, dtype=torch.int64)
        attention.attend_next(new, held, held, places, places, places, places[:1], 0.125)
    assert len(launched) == 6, sorted(launched)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for source in launched.values():
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
