"""`python -m rollmesh.trainer.controller --spec JSON`: one rank of a train controller."""

import argparse
import faulthandler
import sys
from pathlib import Path

import msgspec

from rollmesh.core.logs import setup
from rollmesh.core.process import die_with_parent
from rollmesh.core.redaction import redact_output
from rollmesh.trainer.controller.rank import RankProcess
from rollmesh.trainer.controller.spec import from_argument
from rollmesh.wire.keys import Role, read_keys


def main() -> int:
    """Run the rank; return its exit code."""
    redact_output(with_stdout=True)
    die_with_parent()
    faulthandler.enable()  # a write to fetched, read-only memory is reported with its line
    parser = argparse.ArgumentParser(prog="rollmesh.trainer.controller")
    parser.add_argument("--spec", required=True)
    spec = from_argument(parser.parse_args().spec)
    if spec.reads_secret:
        spec = msgspec.structs.replace(spec, secret=sys.stdin.readline().strip())
    setup(f"rank-{spec.rank}", Path(spec.folder) if spec.folder else None)
    return RankProcess(spec, read_keys(role=Role.PUBLISHER)).run()


if __name__ == "__main__":
    sys.exit(main())
