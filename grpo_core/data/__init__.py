"""Prompts: text or messages, as token ids, in an order that follows from seed and rollout number."""
