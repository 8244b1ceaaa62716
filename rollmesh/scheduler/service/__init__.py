"""The scheduler as a service: its machine, its journal and its process.

Rooms: what it is told and what it asks for in actions.py and records.py, the machine in
scheduler.py, its shell in process.py.
"""
