"""The router process: who asked for what, who runs it, who is alive, and which engines there are.

All of it is soft state: the client owns what was asked, the worker what it runs; a restarted router
is told again by both. The ledger and the fleet are pure machines, process.py is their shell.
"""
