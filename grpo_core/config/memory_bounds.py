"""Bounds of what is in memory at one time. The forecast of memory needs them, and must not import torch."""

MAX_ROWS = 512  # completions that the transformers engine samples together
CHUNK_LOGITS = 2**24  # logits that the output layer computes together on a CPU: 64 MiB of float32
KEPT_LOGITS = 2**25  # probabilities kept for the backward pass; if there are more, they are computed again
GPU_CHUNK_LOGITS = 2**28  # 1 GiB
HEAD_BYTES_PER_LOGIT = 4  # of a chunk on a GPU: float32, and their gradient, in any dtype, is written over them
DIVERGENCE_BYTES_PER_LOGIT = 64  # of a chunk on any device: what autograd keeps of both models' distributions
GPU_CHUNK_TOKENS = 4096
PACKED_BYTES = 2**29  # of a buffer that weights go to servers from by NCCL, besides the tensor that fills it
GPU_TILE = 128  # rows that a matrix product on a GPU computes together


def chunk_tokens(device: str, vocabulary: int) -> int:
    """Tokens whose logits the output layer computes together on a device of this type ("cpu", "cuda").

    Few on a CPU, so that passes over the logits stay near the cache. Many on a GPU, so that reading the weight does
    not bound the products: for each chunk the weight is read three times in bfloat16, and its gradient is read and
    written in float32: 14·V·h bytes for 8·V·h operations per token. An H100 does about 230 operations per byte: the
    traffic takes as long as the products at 400 tokens, and a quarter of it at the 1,664 of V = 152k.
    """
    if device == "cpu":
        return max(1, CHUNK_LOGITS // vocabulary)
    tokens = min(GPU_CHUNK_TOKENS, GPU_CHUNK_LOGITS // vocabulary)
    return max(GPU_TILE, tokens - tokens % GPU_TILE)
