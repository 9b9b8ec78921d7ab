"""How much is in memory at once. What is forecast follows from these, so they are known without torch."""

MAX_ROWS = 512  # completions that the transformers engine samples at once
CHUNK_LOGITS = 2**24  # logits that the output layer makes at once: 64 MiB of float32
KEPT_LOGITS = 2**25  # probabilities kept for the backward pass; where there are more, they are computed again
