"""vLLM as an engine: inside the training process, or as servers."""
