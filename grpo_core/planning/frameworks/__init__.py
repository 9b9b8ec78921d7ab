"""Other systems' recipes and launch scripts, planned by those systems' own arithmetic."""
