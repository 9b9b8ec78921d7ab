"""The training loop and what it needs: batches, updates, weight synchronisation, checkpoints, health."""
