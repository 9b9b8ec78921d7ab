"""The output layer in chunks, on a CPU and as a GPU has it: exact, and few passes over the logits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.command import python_path
from grpo_core.config.memory_bounds import chunk_tokens
from grpo_core.model import fused_logprobs
from grpo_core.model.logprobs import float32_product
from grpo_core.system.torch_releases import RELEASE

# Relative, of values and of gradients. Logits of up to 200 are not rounded, but their gradient is, by Triton's
# interpreter towards zero.
BOUND = {"float32": (5e-6, 5e-6), "bfloat16": (5e-6, 6e-3)}


@pytest.mark.parametrize("vocabulary", [32_000, 128_256, 151_936, 262_144])
def test_a_chunk_on_a_gpu_has_tokens_enough_for_the_products_to_outlast_the_reading_of_the_weight(
    vocabulary: int,
) -> None:
    tokens = chunk_tokens("cuda", vocabulary)
    traffic, operations = 14 / tokens, 8  # bytes and floating-point operations per token and element of the weight
    assert traffic * 230 < operations / 2
    assert 1024 <= tokens <= 4096
    assert tokens % 128 == 0
    assert tokens * vocabulary <= 2**28


@pytest.mark.parametrize(("vocabulary", "tokens"), [(20, 838_860), (4096, 4096), (151_936, 110), (2**25, 1)])
def test_a_chunk_on_a_cpu_stays_near_the_cache(vocabulary: int, tokens: int) -> None:
    assert chunk_tokens("cpu", vocabulary) == tokens


@pytest.fixture(scope="module")
def interpreted() -> Any:
    command = [sys.executable, "-W", "ignore", "-m", "tests.grpo_core.model.interpreting"]
    environment = {**os.environ, "PYTHONPATH": python_path(Path(__file__).parents[3])}
    environment.pop("PYTEST_VERSION")  # shapes are checked elsewhere
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("way", ["fused", "chunked"])
def test_values_and_gradients_are_those_of_a_plain_float64_computation(interpreted: Any, way: str, dtype: str) -> None:
    *values, of_states, of_weight = interpreted[dtype][way]
    of_values, of_gradients = BOUND[dtype]
    assert max(values) < of_values
    assert max(of_states, of_weight) < of_gradients


@pytest.mark.slow
def test_tokens_that_the_model_excludes_have_no_gradient(interpreted: Any) -> None:
    assert interpreted["infinite"]


@pytest.mark.slow
def test_only_products_and_one_kernel_each_way_pass_over_the_logits_on_a_gpu(interpreted: Any) -> None:
    operations, bytes_per_logit = interpreted["passes"]["fused"]
    assert sorted(operations) == ["aten.mm.default"] + ["aten.mm.out"] * 3
    kernels = 4 + (4 + 2)  # the first reads, the second reads and writes
    before = interpreted["passes"]["chunked"][1]
    assert bytes_per_logit + kernels < before / 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_products_on_a_gpu_have_matching_shapes_and_dtypes_and_one_chunk_s_logits_at_a_time(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """On tensors without data; the kernels are left out."""
    monkeypatch.setattr(fused_logprobs, "_statistics", lambda logits, *_: logits.new_empty(4, len(logits)).float())
    monkeypatch.setattr(fused_logprobs, "_compute_gradient", lambda *_: None)
    monkeypatch.setattr(fused_logprobs, "chunk_tokens", lambda *_: 8)
    if RELEASE < (2, 13):  # its addmm of two dtypes knows no tensors without data, but its mm does

        def addmm(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **keywords: Any) -> torch.Tensor:
            return torch.mm(a, b, **keywords)

        monkeypatch.setattr(torch, "addmm", addmm)

    class Context:
        needs_input_grad = (True, True, False, False, False)

        def set_materialize_grads(self, value: bool) -> None: ...

        def save_for_backward(self, *tensors: torch.Tensor) -> None:
            self.saved_tensors = tensors

    made: list[weakref.ref[torch.Tensor]] = []

    def product(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        assert all(before() is None for before in made), "the logits of two chunks are there together"
        logits = float32_product(hidden, weight)
        made.append(weakref.ref(logits))
        return logits

    monkeypatch.setattr(fused_logprobs, "float32_product", product)
    context = Context()
    hidden, weight = (torch.empty(count, 16, dtype=dtype, device="meta") for count in (21, 300))
    targets = torch.empty(21, dtype=torch.int64, device="meta")
    values = fused_logprobs.FusedLogprobs.forward(context, hidden, weight, targets, 0.7, None)
    gradients = fused_logprobs.FusedLogprobs.backward(context, values[0], None)
    assert len(made) == 2 * 3
    assert [(x.shape, x.dtype) for x in values] == [((21,), torch.float32)] * 2
    assert [(x.shape, x.dtype) for x in gradients[:2] if x is not None] == [((21, 16), dtype), ((300, 16), dtype)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        (90, "bf16"),
        *(pytest.param(*it, marks=pytest.mark.e2e) for it in [(90, "fp32"), (80, "bf16"), (100, "bf16")]),
    ],
)
def test_the_kernels_compile_for_nvidia_s_gpus(
    architecture: int, dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the compiler and assembler that come with Triton; no GPU is needed."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    statistics, gradient = fused_logprobs._statistics_kernel, fused_logprobs._gradient_kernel
    given = {"gradient": f"*{dtype}", "stride": "i32", "grad_logprobs": "*fp32"}
    for kernel, more in (
        (statistics, {}),
        (gradient, {**given, "grad_entropy": "constexpr"}),
        (gradient, {**given, "grad_entropy": "*fp32"}),
    ):
        ptx = _compiled(kernel, more, architecture).asm["ptx"]
        if kernel is gradient and dtype == "bf16":
            before = ptx[: ptx.index("st.global")]  # over logits that other threads read
            assert before.rindex("bar.sync") > [*re.finditer(r"@%p\d+ ld\.global", before)][-1].start()


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The variants of the kernels that Triton would compile for a GPU, noted instead of run."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend, noted = make_backend(GPUTarget("cuda", 90, 32)), set[str]()

    def noting(kernel: Any) -> Any:
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)

        def note(*arguments: Any, **options: Any) -> None:
            _, specialization, _ = bind(*arguments, **options)
            noted.add(f"{kernel.__name__} {specialization} {options}")

        return {(rows,): note for rows in range(1, 400)}

    for name in ("_statistics_kernel", "_gradient_kernel"):
        monkeypatch.setattr(fused_logprobs, name, noting(getattr(fused_logprobs, name)))
    monkeypatch.setattr(fused_logprobs, "_add_product", lambda *_: None)
    return noted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_no_length_of_a_pass_compiles_a_kernel_that_the_start_has_not(
    variants: set[str], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, entropy_gradient: bool
) -> None:
    """Chunks of 128 tokens, as if of a vocabulary of two million. What comes to a GPU comes in one buffer, so that
    targets may begin anywhere."""
    monkeypatch.setattr(fused_logprobs, "chunk_tokens", lambda *_: 128)
    fused_logprobs.compile_kernels(48, dtype, torch.device("cpu"), entropy_gradient=entropy_gradient)
    at_start = {*variants}
    assert len(at_start) == 2 + entropy_gradient
    for tokens in (1, 2, 15, 16, 17, 128, 129, 144, 145, 300):
        for offset in (0, 1):
            hidden, weight = torch.zeros(tokens, 16, dtype=dtype, requires_grad=True), torch.zeros(48, 16, dtype=dtype)
            targets = torch.zeros(offset + tokens, dtype=torch.int64)[offset:]
            logprobs, entropy = fused_logprobs.FusedLogprobs.apply(hidden, weight, targets, 1.0, None)
            gradients = torch.zeros(2, offset + tokens)[:, offset:]
            torch.autograd.backward([logprobs], [gradients[1]], retain_graph=True)
            if entropy_gradient:
                torch.autograd.backward([logprobs, entropy], [*gradients])
    assert variants == at_start


def _compiled(kernel: Any, more: dict[str, str], architecture: int) -> Any:
    """Compile a kernel with these types of arguments, beside those that both have."""
    import triton
    from triton.backends.compiler import GPUTarget

    kinds = {"logits": "*fp32", "targets": "*i64", "scale": "fp32", "values": "*fp32", "BLOCK": "constexpr"}
    kinds |= {"rows": "i32", "vocabulary": "i32", **more}
    signature = {name: kinds[name] for name in kernel.arg_names}
    constants = {name: None for name, kind in signature.items() if kind == "constexpr"}
    source = triton.compiler.ASTSource(kernel, signature, {**constants, "BLOCK": fused_logprobs.BLOCK})
    target = GPUTarget("cuda", architecture, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": fused_logprobs.WARPS})
    assert compiled.asm["cubin"]
    return compiled
