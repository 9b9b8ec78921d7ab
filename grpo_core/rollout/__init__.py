"""Rollout engines: what samples completions. One file per engine, all behind `engine.Engine`."""
