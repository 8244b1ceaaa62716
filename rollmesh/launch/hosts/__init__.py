"""Hosts: where launch starts the processes of a run."""
