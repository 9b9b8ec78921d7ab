"""Bounds of what is in memory at one time. The forecast of memory needs them, and must not import torch."""

MAX_ROWS = 512  # completions that the transformers engine samples together
CHUNK_LOGITS = 2**24  # logits that the output layer computes together: 64 MiB of float32
KEPT_LOGITS = 2**25  # probabilities kept for the backward pass; if there are more, they are computed again
