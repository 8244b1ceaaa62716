"""Relay: calls forwarded unchanged to an endpoint of the agent's own dialect.

Tokens and log-probs that the engine returns are stored with the text, and each record lists the
data that it lacks. Used by the stand-alone gateway with `--capture relay`.
"""
