"""Scheduler: shares one GPU fleet between several pipelines.

- The journal is the only record of GPU ownership.
- planning is pure; service carries plans out; admission is a separate process; nodes join machines;
  simulator compares policies in simulated time.
"""
