"""Environments that others have written, one package per file."""
