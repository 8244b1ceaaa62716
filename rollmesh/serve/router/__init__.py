"""The router process: open groups, the workers that run them, membership and the engine fleet.

All of it is soft state: clients own what was requested and workers what they run, and both report
it again to a restarted router. The scheduler and the fleet are pure machines; process.py performs
their I/O.
"""
