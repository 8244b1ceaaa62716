"""What serves rollouts: the router, the workers with their HTTP edge, and the client.

router, server and client are siblings and meet only on the wire; server stands on interception.
"""
