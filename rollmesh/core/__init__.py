"""Shared basics of all rooms: ids, types, config, errors, clock, logs, metrics, journal.

Core imports no other room and knows neither sockets nor tensors.
"""
