"""Run a program that nobody has read."""
