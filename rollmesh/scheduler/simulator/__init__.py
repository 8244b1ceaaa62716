"""Simulator: compares scheduling policies on a trace, in simulated time."""
