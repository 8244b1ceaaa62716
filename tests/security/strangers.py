"""Code that runs as another user of this machine, as an attacker with an account would run it."""

import os
import subprocess
import sys

import pytest

STRANGER = 65534
"""`nobody` on Linux."""
LIMIT_S = 60.0
BECOME = f"os.setgroups([]); os.setgid({STRANGER}); os.setuid({STRANGER})"

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can run a process as another user")


def run_as_stranger(imports: str, attack: str, *args: str) -> str:
    """Run `attack` as uid 65534, after `imports`; return what it printed.

    The imports are done before the user changes: the stranger need not be able to read our files.
    """
    code = f"import os, sys\n{imports}\n{BECOME}\n{attack}"
    argv = [sys.executable, "-c", code, *args]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
