"""Admission: registers, admits, kills and removes pipelines of a fleet.

- The process keeps no state: all of it is in the scheduler's journal.
"""
