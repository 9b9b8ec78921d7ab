"""The built-in rewards, one module per family, each with its records."""
