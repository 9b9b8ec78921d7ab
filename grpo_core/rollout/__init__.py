"""From prompts to scored completions: the engine protocol, the engines, one generation batch."""
