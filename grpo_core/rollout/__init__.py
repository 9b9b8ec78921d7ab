"""Rollout engines: what samples completions. One file per engine, all behind `engine.Engine`."""

MAX_ROWS = 512  # completions that the transformers engine samples at once
