"""What every room uses: ids, types, config, errors, clock, logs, metrics, journal.

It imports no other room and knows neither sockets nor tensors.
"""
