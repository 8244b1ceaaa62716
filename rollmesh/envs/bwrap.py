"""The command line of bubblewrap for one slot: what of the host a program sees there.

- Nothing of the host is visible but what is listed: system folders, Python's own, the program with
  its interpreter, and what the environment names. All of it is read-only.
- /tmp, /dev and /proc are the slot's own; home and working folder keep their paths.
"""

import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix/store")
ETC = (
    *("alternatives", "ca-certificates", "ca-certificates.conf", "fonts", "group", "host.conf"),
    *("hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "locale.alias"),
    *("mime.types", "nsswitch.conf", "passwd", "pki", "protocols", "resolv.conf", "services"),
    *("ssl", "timezone"),
)
NAMESPACES = ("user", "pid", "ipc", "uts")
PREFIX_SIGNS = ("pyvenv.cfg", "lib/node_modules", "include/node", "conda-meta", "lib/python3*")
"""Folders that an installation has beside its `bin`."""
MAX_LINKS = 16


def bwrap_argv(
    argv: Sequence[str],
    *,
    network: str,
    read_only: Iterable[Path],
    writable: Iterable[Path],
    folder: Path,
) -> list[str]:
    """bubblewrap and its words, to which the program is added."""
    words = ["bwrap", "--die-with-parent", "--new-session", "--unshare-cgroup-try"]
    words += [f"--unshare-{name}" for name in NAMESPACES]
    words += ["--unshare-net"] if network != "host" else []
    words += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for name in SYSTEM:
        if os.path.islink(name):
            words += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            words += ["--ro-bind", name, name]
    for name in ETC:
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    bound: list[Path] = []
    for path in sorted(set(read_only), key=lambda each: len(str(each))):
        if any(path.is_relative_to(other) for other in bound):
            continue
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        else:
            words += ["--ro-bind-try", str(path), str(path)]
        bound.append(path)  # what is below a link is found through it
    for path in writable:
        words += ["--bind", str(path), str(path)]
    return [*words, "--chdir", str(folder), "--remount-ro", "/", "--", *argv]


def visible_paths(argv: Sequence[str], env: Mapping[str, str]) -> list[Path]:
    """The program, its interpreter, their installations, and files that its words name."""
    found = [Path(sys.base_prefix), Path(sys.prefix)]
    program = shutil.which(argv[0], path=env.get("PATH", os.defpath))
    for start in (program, interpreter_of(argv[0], env), sys.executable):
        for hop in _hops(start):
            found += [hop, *_installation(hop)]
    found += map(Path, named_files(argv))
    return [path for path in found if not _is_system(path)]


def named_files(argv: Sequence[str]) -> list[str]:
    """The words of a command line that are absolute paths of files."""
    return [word for word in argv if os.path.isabs(word) and os.path.isfile(word)]


def interpreter_of(program: str, env: Mapping[str, str]) -> str:
    """The executable that runs `program`: itself, or the interpreter that its first line names."""
    path = shutil.which(program, path=env.get("PATH", os.defpath))
    if path is None:
        return program
    try:
        with open(path, "rb") as file:
            first = file.readline(512)
    except OSError:
        return path
    if not first.startswith(b"#!"):
        return path
    words = first[2:].decode("utf-8", "replace").split()
    if words and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if not word.startswith("-")]
    return shutil.which(words[0], path=env.get("PATH", os.defpath)) or path if words else path


def _hops(start: str | None) -> Iterator[Path]:
    """A path, and each that its symbolic links lead to."""
    path = Path(os.path.abspath(start)) if start else None
    for _ in range(MAX_LINKS):
        if path is None:
            return
        yield path
        real = path.parent.resolve() / path.name
        if real != path:
            yield real
        target = os.readlink(real) if os.path.islink(real) else None
        path = Path(os.path.normpath(real.parent / target)) if target else None


def _installation(program: Path) -> list[Path]:
    """The folder of a virtual environment, of Python or of Node, whose `bin` holds `program`."""
    prefix = program.parent.parent
    if program.parent.name != "bin" or prefix in (Path("/"), Path.home(), *Path.home().parents):
        return []
    return [prefix] if any(any(prefix.glob(sign)) for sign in PREFIX_SIGNS) else []


def _is_system(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in SYSTEM)
