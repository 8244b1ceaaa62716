"""Checks of a machine before a run starts there, each with its remedy: `rollmesh doctor`."""
