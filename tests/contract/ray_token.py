"""The token by which what Ray opens to other machines is guarded in tests.

Owns nothing but the words. Invariant: one for each process of tests, for Ray reads it once, and a
second cluster of the process would be dialled with the first one's. Driven by the tests with Ray.
"""

import secrets

RAY_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""Environment, to be set before Ray is loaded; otherwise its token would lie in the user's home."""
