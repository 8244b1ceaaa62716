"""`python -m rollmesh.engine.embedded`: the embedded engine as a process."""

import sys

from rollmesh.engine.embedded.server import main

if __name__ == "__main__":
    sys.exit(main())
