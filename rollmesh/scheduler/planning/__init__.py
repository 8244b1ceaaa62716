"""Planner: decides what to do with the GPUs, given their owners and the open requests.

- No clock, no sockets, no files.
"""
