"""Run an unreviewed program."""
