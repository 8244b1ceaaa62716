"""The environment of Ray in tests, and the token that guards its ports.

There is one for each test process, since Ray reads it once, and would use it for a second cluster
of the process too.
"""

import importlib.util
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

HAS_RAY = importlib.util.find_spec("ray") is not None
RAY_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""Environment to set before Ray is loaded; otherwise its token would be in the user's home."""


@contextmanager
def ray_environment() -> Iterator[pytest.MonkeyPatch]:
    """Set the token, and the path by which Ray's workers find the package; skip without Ray."""
    if not HAS_RAY:
        pytest.skip("Ray is not installed: make test-ray")
    path = os.pathsep.join(each for each in sys.path if each)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**RAY_TOKEN, "PYTHONPATH": path}.items():
            patch.setenv(name, value)  # Ray reads them when it is loaded
        yield patch
