"""Checkpoints of a run and the recovery from them: write, verify, find, and plan what to redo."""
