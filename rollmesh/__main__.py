"""`python -m rollmesh VERB ...`, also for torchrun."""

import sys

from rollmesh.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
