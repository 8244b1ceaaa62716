"""Nodes: the agent that reports a machine's GPUs, and the scheduler in a Ray cluster."""
