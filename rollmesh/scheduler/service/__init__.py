"""Scheduler service: a pure state machine, its SQLite journal, and the process around them."""
