"""The token that guards the ports of Ray in tests.

There is one for each test process, since Ray reads it once, and would use it for a second cluster
of the process too.
"""

import secrets

RAY_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""Environment to set before Ray is loaded; otherwise its token would be in the user's home."""
