"""`rollmesh keys FILE`: writes the keys with which processes on several machines trust each other.

Invariant: an existing file is never overwritten, and nobody but its owner can read the new one.
Driven by people, once per mesh; every process finds the file by the variable ROLLMESH_KEYS.
"""

from pathlib import Path

from rollmesh.cli.options import parser
from rollmesh.core.errors import UserError
from rollmesh.wire.keys import KEYS_VARIABLE, new_keys


def main(argv: list[str]) -> int:
    """Write it."""
    arguments = parser("keys", "Write the key file of a mesh that spans machines.")
    arguments.add_argument("file", type=Path)
    file: Path = arguments.parse_args(argv).file
    try:
        new_keys(file)
    except OSError as error:
        raise UserError(f"{file}: {str(error.strerror).lower()}; choose another name") from None
    print(f"wrote {file}; set {KEYS_VARIABLE}={file.absolute()} for every process of the mesh")
    return 0
