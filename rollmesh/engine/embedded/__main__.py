"""`python -m rollmesh.engine.embedded`: the embedded engine as a process.

Invariant: nothing but the call; arguments are those of `server.parse`. Started by launch, by hand.
"""

import sys

from rollmesh.engine.embedded.server import main

if __name__ == "__main__":
    sys.exit(main())
