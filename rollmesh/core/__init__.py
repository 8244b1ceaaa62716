"""The words everyone speaks: ids, types, config, errors, clock, logs, metrics, journal.

Nothing of rollmesh lies below this room; it knows neither sockets nor tensors.
"""
