"""The arithmetic of a run before it starts: batches, updates, refusals with fixes, forecasts."""
