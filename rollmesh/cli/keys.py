"""`rollmesh keys ...`: make, list and revoke the keys of a mesh.

    rollmesh keys FOLDER                       the hub's pair, and one for each role
    rollmesh keys add ROLE [--name N]          one more member
    rollmesh keys list                         names, roles and files
    rollmesh keys remove NAME                  hubs refuse that key within a second

Nothing that exists is overwritten, and only its owner can read a file that is made here.
"""

import argparse
import os
from pathlib import Path

from rollmesh.cli.options import parser
from rollmesh.core.errors import ConfigError, UserError
from rollmesh.core.secret_file import (
    ADMIN_TOKEN_FILE_VARIABLE,
    make_secret_file,
    read_or_make_secret,
)
from rollmesh.wire.key_search import RUN_KEYS
from rollmesh.wire.keys import (
    KEYS_VARIABLE,
    MAKEABLE,
    Role,
    add_member,
    new_keys,
    read_key_file,
    read_members,
    remove_member,
)

VERBS = ("add", "list", "remove")


def main(argv: list[str]) -> int:
    """Do what the arguments say."""
    if argv and argv[0] in VERBS:
        return change(argv)
    arguments = parser(
        "keys",
        "Make a mesh's keys: the hub's and one for each role. "
        "`rollmesh keys add`, `list` and `remove` change them.",
    )
    arguments.add_argument("folder", type=Path)
    arguments.add_argument(
        "--admin-token-file", type=Path, help="make the router's token too, if it is missing"
    )
    arguments.add_argument(
        "--keep", action="store_true", help="keep the folder's keys, if it is there already"
    )
    arguments.add_argument(
        "--export",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="copy a member's key file, such as worker=/worker-keys/worker.json; may be repeated",
    )
    options = arguments.parse_args(argv)
    settings = {KEYS_VARIABLE: options.folder.absolute()}
    write(options.folder, keep=options.keep)
    if options.admin_token_file:
        read_or_make_secret(options.admin_token_file)
        settings[ADMIN_TOKEN_FILE_VARIABLE] = options.admin_token_file.absolute()
    for words in options.export:
        export(options.folder, words)
    shown = " ".join(f"{name}={path}" for name, path in settings.items())
    print(f"set {shown} for the processes of the mesh on this machine")
    print(f"another machine gets one file: {options.folder}/worker.json for its workers")
    return 0


def change(argv: list[str]) -> int:
    """`add`, `list` or `remove`."""
    verb = argv[0]
    arguments = parser(f"keys {verb}", "Change or list the members of a mesh.")
    if verb == "add":
        roles = [role.value for role in MAKEABLE]
        arguments.add_argument("role", choices=roles, help=f"one of {', '.join(roles)}")
        arguments.add_argument("--name", help="of the key and its file (default: the role)")
    elif verb == "remove":
        arguments.add_argument("name", help="`rollmesh keys list` has the names")
    arguments.add_argument(
        "--keys", type=Path, metavar="DIR", help=f"key folder (default: {KEYS_VARIABLE}, or keys)"
    )
    arguments.add_argument("--run", type=Path, metavar="DIR", help="the keys of this run folder")
    options = arguments.parse_args(argv[1:])
    folder = folder_of(options)
    if verb == "add":
        if not folder.exists():
            new_keys(folder, ())
        path = add_member(folder, Role(options.role), options.name or options.role)
        print(f"wrote {path}")
        print(f"copy it to where it is needed, mode 0600, and set {KEYS_VARIABLE} to it there")
    elif verb == "list":
        for each in read_members(folder):
            print(f"{each.name:<20} {each.role:<10} {folder / each.name}.json")
    else:
        remove_member(folder, options.name)
        print(f"removed {options.name}: hubs that read {folder} refuse its key")
    return 0


def folder_of(options: argparse.Namespace) -> Path:
    """The key folder that is meant."""
    if options.keys and options.run:
        raise ConfigError("--keys and --run: name one of them")
    if options.run:
        folder: Path = options.run / RUN_KEYS
        return folder
    named = options.keys or Path(os.environ.get(KEYS_VARIABLE) or RUN_KEYS)
    if named.is_file():
        raise ConfigError(f"{named}: a key file, and a key folder is needed; name it by --keys")
    return Path(named)


def write(folder: Path, *, keep: bool) -> None:
    """New keys, unless those that exist are kept; UserError if they cannot be made."""
    try:
        new_keys(folder)
        print(f"wrote {folder}")
    except FileExistsError as error:
        if not keep:
            raise _refusal(folder, error) from None
        read_key_file(folder)
        print(f"kept {folder}")
    except OSError as error:
        raise _refusal(folder, error) from None


def export(folder: Path, words: str) -> None:
    """Copy a member's key file to `NAME=FILE`, unless a copy is there."""
    name, _, target = words.partition("=")
    if not name or not target:
        raise ConfigError(f"--export {words}: write it as NAME=FILE")
    source, path = folder / f"{name}.json", Path(target)
    keys = read_key_file(source)
    try:
        make_secret_file(path, source.read_bytes())
        print(f"wrote {path}")
    except FileExistsError:
        if read_key_file(path).public != keys.public:
            raise ConfigError(f"{path}: it holds another key than {source}; remove it") from None
        print(f"kept {path}")
    except OSError as error:
        raise _refusal(path, error) from None


def _refusal(file: Path, error: OSError) -> UserError:
    return UserError(f"{file}: {str(error.strerror).lower()}; choose another name")
