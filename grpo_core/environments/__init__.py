"""Conversations with tools and environments: turns as token ids, tool calls, the processes that environments run in."""
