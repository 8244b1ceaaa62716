"""Import modules one by one in a fresh interpreter and report which heavy library was loaded.

The probe runs in the child and returns {library: the module whose import loaded it}.
"""

import json
import subprocess
import sys
from collections.abc import Sequence

HEAVY = ("torch", "transformers", "numpy", "matplotlib")
PROBE = """
import importlib, json, sys
heavy, names, loaded = json.loads(sys.argv[1]), json.loads(sys.argv[2]), {}
for name in names:
    importlib.import_module(name)
    for library in heavy:
        if library in sys.modules:
            loaded.setdefault(library, name)
print(json.dumps(loaded))
"""


def heavy_imports(names: Sequence[str], heavy: Sequence[str] = HEAVY) -> dict[str, str]:
    """Return which of `heavy` the imports of `names` load, and by which of them."""
    argv = [sys.executable, "-c", PROBE, json.dumps(list(heavy)), json.dumps(list(names))]
    answer = subprocess.run(argv, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    loaded: dict[str, str] = json.loads(answer.stdout)
    return loaded
