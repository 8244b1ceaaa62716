"""Rollout serving: the router, the workers with their interception server, and the client.

router, server and client do not import each other and meet on the wire; server imports
interception.
"""
