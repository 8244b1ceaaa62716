"""The first program in a slot: it prepares the slot from within and then executes the agent's.

    starter.py FD HOST PORT UID NUM_PROCESSES DATA_BYTES PROGRAM [WORD...]     (0 stands for none)

- In a network namespace of its own it listens at HOST:PORT, where the agent expects its endpoint,
  and sends the listening socket to the worker through FD; the worker accepts there, since a socket
  belongs to the namespace in which it was made.
- It waits for a byte, so that the worker can add it to a control group, and drops root's rights for
  UID.
- FD closes when PROGRAM is executed; if that fails, the reason is written there first.
- It uses the standard library only (python -I -S), and runs before any code of the agent's.
"""

import _socket
import os
import resource
import sys

SCM_RIGHTS = 1
PR_SET_NO_NEW_PRIVS = 38
NOT_STARTED = 127


def main(argv: list[str]) -> None:
    """Prepare the slot, report to the worker, and execute the program."""
    control = _socket.socket(fileno=int(argv[0]))
    os.set_inheritable(int(argv[0]), False)
    try:
        host, port, uid, num_processes, num_bytes = argv[1], *map(int, argv[2:6])
        control.sendmsg([b"."], _rights(_listening(host, port)) if port else [])
        if not control.recv(1):  # the worker has given up
            os._exit(NOT_STARTED)
        for limit, most in (
            (resource.RLIMIT_NPROC, num_processes),
            (resource.RLIMIT_DATA, num_bytes),
        ):
            if most:
                _, hard = resource.getrlimit(limit)
                most = most if hard == resource.RLIM_INFINITY else min(most, hard)
                resource.setrlimit(limit, (most, most))
        if uid:
            _become(uid)
        os.closerange(3, control.fileno())
        os.closerange(control.fileno() + 1, 1024)
        os.execvp(argv[6], argv[6:])
    except OSError as error:
        control.send(f"{error.filename or argv[6]}: {error.strerror}".encode())
        os._exit(NOT_STARTED)


def _listening(host: str, port: int) -> int:
    """Return the descriptor of a listening socket."""
    family = _socket.AF_INET6 if ":" in host else _socket.AF_INET
    listening = _socket.socket(family, _socket.SOCK_STREAM)
    listening.bind((host, port))
    listening.listen(1024)
    return listening.detach()


def _rights(descriptor: int) -> list[tuple[int, int, bytes]]:
    raw = descriptor.to_bytes(4, sys.byteorder)
    return [(_socket.SOL_SOCKET, SCM_RIGHTS, raw)]


def _become(uid: int) -> None:
    """Change to another user, irreversibly."""
    import ctypes  # noqa: PLC0415 - costs milliseconds, and only this needs it

    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
