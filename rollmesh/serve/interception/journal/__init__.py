"""Journal of a gateway: sessions on disk, so that they survive a restart of the gateway.

The on-disk format of segments and records belongs to core/journal.py.
"""
