"""How vLLM has to be started for log-probabilities that are comparable with the trainer's: at the temperature, over the
tokens that min-p, top-k and top-p leave, after the repetition penalty; with float32 logits, which its head would round
to bfloat16."""

LOGPROBS_MODE = "processed_logprobs"
HEAD = {"head_dtype": "float32"}  # changes to the model's configuration ("hf_overrides")
