"""Relay: calls forwarded as they are to an endpoint that speaks the agent's own dialect.

What the engine returns of tokens and log-probs is kept beside the text, and each record says what
it lacks. Driven by the stand-alone gateway with `--capture relay`.
"""
