"""`rollmesh keys FILE`: writes the keys with which processes on several machines trust each other.

Invariant: an existing file is never overwritten, and nobody but its owner can read a new one.
Driven by people, once per mesh, and by a container that starts before all others; every process
finds the files by the variables ROLLMESH_KEYS and ROLLMESH_ADMIN_TOKEN_FILE.
"""

from pathlib import Path

from rollmesh.cli.options import parser
from rollmesh.core.errors import UserError
from rollmesh.core.secret_file import ADMIN_TOKEN_FILE_VARIABLE, read_or_make_secret
from rollmesh.wire.keys import KEYS_VARIABLE, new_keys, read_keys


def main(argv: list[str]) -> int:
    """Write them."""
    arguments = parser("keys", "Write the key file of a mesh that spans machines.")
    arguments.add_argument("file", type=Path)
    arguments.add_argument(
        "--admin-token-file", type=Path, help="make the router's token too, if it is missing"
    )
    arguments.add_argument(
        "--keep", action="store_true", help="keep the file's keys, if it is there already"
    )
    options = arguments.parse_args(argv)
    settings = {KEYS_VARIABLE: options.file.absolute()}
    write(options.file, keep=options.keep)
    if options.admin_token_file:
        read_or_make_secret(options.admin_token_file)
        settings[ADMIN_TOKEN_FILE_VARIABLE] = options.admin_token_file.absolute()
    told = " ".join(f"{name}={path}" for name, path in settings.items())
    print(f"set {told} for every process of the mesh")
    return 0


def write(file: Path, *, keep: bool) -> None:
    """New keys, unless those that are there are kept; UserError if they cannot stand there."""
    try:
        new_keys(file)
        print(f"wrote {file}")
    except FileExistsError as error:
        if not keep:
            raise _refusal(file, error) from None
        read_keys({KEYS_VARIABLE: str(file)})
        print(f"kept {file}")
    except OSError as error:
        raise _refusal(file, error) from None


def _refusal(file: Path, error: OSError) -> UserError:
    return UserError(f"{file}: {str(error.strerror).lower()}; choose another name")
