"""Environments: the interface, the built-in ones, and the isolation of agents' programs."""

from rollmesh.envs.scratch import read_bytes as read_bytes
from rollmesh.envs.scratch import read_text as read_text
