"""Pipelines that share a fleet, in simulated time: what a policy is worth before it is used."""
