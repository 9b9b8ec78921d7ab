"""The policy as a model: loading, one forward pass over packed rows, log-probabilities, precision."""
