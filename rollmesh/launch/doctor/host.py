"""Checks of this machine: packages, ports, keys, limits, disks, memory and GPUs.

They write only a file for a moment into the run's folder, and listen for a moment.
"""

import fcntl
import importlib.metadata
import os
import platform
import re
import resource
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rollmesh.core.addresses import (
    HOST_MARK,
    PORT_MARK,
    advertised,
    is_loopback,
    own_address,
    split_address,
    with_host,
)
from rollmesh.core.descriptors import BASE, PER_CHILD, PER_ROLLOUT, allow_descriptors
from rollmesh.core.errors import AddressError, ConfigError, UserError
from rollmesh.core.process import listen
from rollmesh.core.secret_files import ADMIN_TOKEN_VARIABLE, admin_token
from rollmesh.launch.checks import NUM_OTHERS, check_page
from rollmesh.launch.doctor.findings import Finding, MachinePlan, Part, fail, failed, ok, warn
from rollmesh.wire.keys import (
    KEYS_VARIABLE,
    Keys,
    Role,
    find_keys,
    keys_of_run,
    read_keys,
)

PACKAGE = "rollmesh"
ROLES = {Part.ROUTER: Role.HUB, Part.TRAINER: Role.PUBLISHER, Part.WORKER: Role.WORKER}
"""Role of the key that a process needs; engines have none."""
KEPT_WEIGHTS, KEPT_CHECKPOINTS = 3, 3
"""Two complete ones are kept, and one is being written."""
CHECKPOINT_BYTES, TRAINING_BYTES, SERVING_BYTES = 12, 16, 4
"""Bytes per parameter: weights and two moments of AdamW, and gradients; float32 on a CPU."""
SHM = Path("/dev/shm")
SHM_BYTES = 64 * 2**20
"""For secrets and tensors of a small run."""
GIB = 2**30
NETWORK_KINDS = (
    *("nfs", "nfs4", "cifs", "smb3", "9p", "lustre", "gpfs", "beegfs", "ceph", "afs"),
    *("fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.ceph", "fuse.glusterfs", "fuse.juicefs"),
)
SHORT_LIVED_KINDS = ("tmpfs", "ramfs", "overlay")
GPU_PROBE = "import torch; print(torch.cuda.device_count())"
GPU_PROBE_S = 120.0
EXTRA_OF_ENV = {"gym": "gym"}


def check_packages(plan: MachinePlan) -> Iterator[Finding]:
    """Compare Python and installed packages with the bounds of rollmesh's own metadata."""
    try:
        metadata = importlib.metadata.metadata(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        yield warn(
            "packages", "rollmesh is not installed, so no version was checked", "pip install -e ."
        )
        return
    python = platform.python_version()
    bounds = metadata["Requires-Python"] or ""
    if SpecifierSet(bounds).contains(python, prereleases=True):
        yield ok("python", f"{python} ({sys.executable})")
    else:
        yield fail("python", f"{python}, and {PACKAGE} needs {bounds}", f"install Python {bounds}")
    extras = {EXTRA_OF_ENV.get(plan.config.env, "")}
    if plan.has(Part.TRAINER) or (plan.starts_engines and plan.config.engine.launch == "embedded"):
        extras.add("train")
    wrong = [
        why for each in metadata.get_all("Requires-Dist") or () if (why := _wrong(each, extras))
    ]
    named = ",".join(sorted(extras - {""}))
    target = f"{PACKAGE}[{named}]" if named else PACKAGE
    if wrong:
        yield fail("packages", ", ".join(wrong), f"pip install '{target}'")
    else:
        yield ok("packages", f"those of {target} are installed")


def _wrong(text: str, extras: set[str]) -> str:
    """Return what is wrong with a required package; '' if it is installed or not needed."""
    needed = Requirement(text)
    if needed.marker and not any(needed.marker.evaluate({"extra": each}) for each in extras):
        return ""
    try:
        found = importlib.metadata.version(needed.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{needed.name} is missing"
    if needed.specifier.contains(found, prereleases=True):
        return ""
    return f"{needed.name} is {found} and must be {needed.specifier}"


def check_ports(plan: MachinePlan) -> Iterator[Finding]:
    """Listen at each address that a process of this machine will bind, unless it runs already."""
    for key, bind in _binds(plan):
        port = split_address(bind)[1]
        where = f"{key} = {bind}"
        try:
            with listen(_plain(bind)) as listening:
                host = listening.getsockname()[0]
        except AddressError as error:
            why, _, remedy = str(error).partition(": ")[2].rpartition("; ")
            if "in use" in why:
                remedy = f"choose another, or end what `ss -ltnp 'sport = :{port}'` shows"
                if key == "router.bind":
                    remedy += "; check a mesh that runs already by --router"
            yield fail("ports", f"{where}: {why}", remedy)
            continue
        yield ok("ports", f"{where} " + ("gets a free port" if port == "0" else "is free"))
        if key == "router.http_bind" and not is_loopback(host) and not _has_token():
            yield fail(
                "ports",
                f"{where}: others can reach it, and there is no token",
                f"set {ADMIN_TOKEN_VARIABLE}",
            )
    if plan.has(Part.ROUTER) and plan.config.dashboard.enabled and not plan.router:
        try:
            check_page(plan.config.dashboard.bind)
        except AddressError as error:
            yield failed("ports", error, "bind 127.0.0.1")


def _binds(plan: MachinePlan) -> Iterator[tuple[str, str]]:
    config = plan.config
    if plan.has(Part.ROUTER) and not plan.router:
        yield "router.bind", config.router.bind
        yield "router.http_bind", config.router.http_bind
        if config.dashboard.enabled:
            yield "dashboard.bind", config.dashboard.bind
    if plan.has(Part.TRAINER) and config.trainer.bind:
        yield "trainer.bind", config.trainer.bind
    if plan.has(Part.WORKER):
        yield "interception.bind", config.interception.bind


def _plain(bind: str) -> str:
    """Return host:port of a bind address, which may name an interface."""
    host, port = split_address(bind)
    if host == "*":
        host = "0.0.0.0"
    for each in psutil.net_if_addrs().get(host, ()):
        if each.family == socket.AF_INET:
            host = str(each.address)
    return with_host(f":{port}", host)


def _has_token() -> bool:
    try:
        return bool(admin_token())
    except ConfigError:
        return False


def check_addresses(plan: MachinePlan) -> Iterator[Finding]:
    """Check the addresses that other machines will be given."""
    config, host = plan.config, plan.config.network.advertise
    if host:
        try:
            found = socket.getaddrinfo(host, None)[0][4][0]
        except OSError:
            yield fail(
                "addresses",
                f"network.advertise = {host}: this machine cannot resolve it",
                "name an address, or add it to the hosts file or DNS of all machines",
            )
            return
        if is_loopback(str(found)):
            yield warn(
                "addresses",
                f"network.advertise = {host} is {found} here",
                "other machines may resolve it likewise: name an address",
            )
            return
    named = {"router": config.router.bind, "trainer": config.trainer.bind or config.router.bind}
    for part, bind in named.items():
        if plan.has(Part(part)):
            chosen = getattr(config, part).advertise or host
            shown = split_address(advertised(bind, chosen, plan.router))[0]
            reach = "only this machine reaches it" if is_loopback(shown) else f"others get {shown}"
            yield ok("addresses", f"{part}: {reach}")
    public, num_workers = config.interception.public_url, config.worker.num_workers
    if plan.has(Part.WORKER) and public and num_workers > 1 and PORT_MARK not in public:
        yield fail(
            "addresses",
            f"interception.public_url = {public} is the same for {num_workers} workers, and a "
            "session is in one",
            f"write {PORT_MARK} into it, and {HOST_MARK} with several machines",
        )
    if plan.has(Part.WORKER) and not public and not is_loopback(own_address()):
        yield ok("addresses", f"agents: {config.interception.bind}, without a public_url")


def check_keys(plan: MachinePlan) -> tuple[list[Finding], Keys | None]:
    """Check the key files of this machine; return also the keys to dial the router with."""
    findings, dialing = [], None
    for part in sorted(plan.parts):
        role = ROLES.get(part)
        if role is None or (plan.router and role is Role.HUB):
            continue
        try:
            if plan.router:
                keys = find_keys(plan.router, role, plan.run)
            else:
                keys = keys_of_run(plan.run, role) if plan.run else read_keys(role=role)
        except UserError as error:
            remedy = f"name a key file of the mesh by {KEYS_VARIABLE} (`rollmesh keys export`)"
            if (found := failed("keys", error, remedy)) not in findings:
                findings.append(found)
            continue
        if keys:
            dialing = dialing or keys
            findings.append(ok("keys", f"{part}: {keys.name}, of role {keys.role}"))
        elif not plan.router and plan.has(Part.ROUTER):
            findings.append(ok("keys", f"{part}: `rollmesh up` makes them for the run"))
        elif not plan.router:
            why = f"{part}: no key file is named"
            findings.append(
                warn("keys", why, f"`rollmesh keys export` makes them; set {KEYS_VARIABLE}")
            )
    return findings, dialing


def check_limits(plan: MachinePlan) -> Iterator[Finding]:
    """Compare the limit of open files with needs."""
    config, (_, hard) = plan.config, resource.getrlimit(resource.RLIMIT_NOFILE)
    num_children = config.worker.num_workers + config.engine.num_launched + NUM_OTHERS
    needs = [(PER_CHILD * num_children, f"a run of {num_children} processes")]
    if plan.has(Part.WORKER):
        most = config.worker.max_rollouts
        needs.append((PER_ROLLOUT * most, f"worker.max_rollouts = {most}"))
    try:
        for num, why in needs:
            allow_descriptors(num, why)
    except ConfigError as error:
        yield failed("ulimit -n", error, "raise the limit")
        return
    allowed = "any number of" if hard == resource.RLIM_INFINITY else hard
    need = BASE + max(num for num, _ in needs)
    yield ok("ulimit -n", f"{allowed} open files are allowed, {need} needed by one process")


def check_folder(plan: MachinePlan) -> Iterator[Finding]:
    """Write, sync, lock and rename a file in the run's folder, or where it will be made."""
    folder = plan.config.run_folder().absolute()
    place = next(each for each in (folder, *folder.parents) if each.exists())
    name = f"run folder {folder}"
    path = place / f".rollmesh-doctor-{secrets.token_hex(4)}"
    try:
        try:
            with path.open("xb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.write(b"x" * 4096)
                file.flush()
                os.fsync(file.fileno())
            path.rename(path.with_suffix(".renamed"))
        finally:
            path.unlink(missing_ok=True)
            path.with_suffix(".renamed").unlink(missing_ok=True)
    except OSError as error:
        why = str(error.strerror).lower()
        yield fail(
            name, f"cannot write, sync, lock and rename there: {why}", "set run.folder to another"
        )
        return
    kind = kind_of(place)
    if kind in NETWORK_KINDS:
        yield warn(
            name,
            f"is on {kind}, where syncing is slow and locks may be local",
            "prefer a local disk for the trainer's host, or test its locks",
        )
    elif kind in SHORT_LIVED_KINDS:
        yield warn(
            name,
            f"is on {kind}, which ends with the machine or container",
            "set run.folder to a disk or volume that stays",
        )
    else:
        yield ok(name, f"can be written, on {kind}")


def kind_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the kind of file system at `path`; '' if unknown (proc_pid_mountinfo(5))."""
    kind, longest = "", -1
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    resolved = path.resolve()
    for line in lines:
        before, _, after = line.partition(" - ")
        point = _OCTAL.sub(lambda found: chr(int(found[1], 8)), before.split()[4])
        if resolved.is_relative_to(point) and len(point) >= longest:
            kind, longest = after.split()[0], len(point)
    return kind


_OCTAL = re.compile(r"\\([0-7]{3})")
"""Spaces and backslashes of a mount point."""


class ModelSize(msgspec.Struct, frozen=True):
    """The size of a model folder's weights."""

    num_bytes: int
    num_parameters: int


_BYTES_OF = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}


def size_of(folder: Path) -> ModelSize:
    """Return the size of the weights, from the heads of the safetensors files."""
    num_bytes = num_parameters = 0
    for path in sorted(folder.glob("*.safetensors")):
        num_bytes += path.stat().st_size
        try:
            with path.open("rb") as file:
                head = msgspec.json.decode(file.read(int.from_bytes(file.read(8), "little")))
            for name, each in head.items():
                if name != "__metadata__":
                    start, stop = each["data_offsets"]
                    num_parameters += (stop - start) // _BYTES_OF.get(each["dtype"], 1)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError):
            num_parameters += path.stat().st_size // 2
    return ModelSize(num_bytes, num_parameters)


def check_space(plan: MachinePlan, size: ModelSize) -> Iterator[Finding]:
    """Compare free space of the run's folder and of /dev/shm, and the memory limit, with needs."""
    config = plan.config
    if plan.has(Part.TRAINER):
        folder = config.run_folder().absolute()
        place = next(each for each in (folder, *folder.parents) if each.exists())
        state = (
            size.num_bytes // 10
            if config.trainer.lora_rank
            else CHECKPOINT_BYTES * size.num_parameters
        )
        need = KEPT_WEIGHTS * size.num_bytes + KEPT_CHECKPOINTS * state + config.journal.max_bytes
        yield _room(place, need, "weights, checkpoints and journal", "run.folder")
    need = SHM_BYTES
    if plan.has(Part.TRAINER) and config.publish.mode == "tensor":
        need += size.num_bytes
    yield _room(SHM, need, "secrets and tensors", "its size (docker run --shm-size)")
    need = 0
    if plan.has(Part.TRAINER) and not config.trainer.device.startswith("cuda"):
        need += TRAINING_BYTES * size.num_parameters
    if plan.starts_engines and config.engine.launch == "embedded":
        need += SERVING_BYTES * size.num_parameters * config.engine.num_embedded
    if plan.has(Part.WORKER):
        need += config.worker.num_workers * 2**28
    limit = memory_limit()
    if need > limit:
        yield fail(
            "memory",
            f"{_gib(limit)} are allowed, and the processes here need about {_gib(need)}",
            "raise the memory limit of the container or job, or run fewer processes here",
        )
    else:
        yield ok("memory", f"{_gib(limit)} are allowed, about {_gib(need)} needed")


def _room(place: Path, need: int, for_what: str, setting: str) -> Finding:
    check = f"disk {place}"
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return fail(check, str(error.strerror).lower(), "mount it")
    if free < need:
        return fail(
            check,
            f"{_gib(free)} are free, and {for_what} need up to {_gib(need)}",
            f"free some, or change {setting}",
        )
    return ok(check, f"{_gib(free)} free, up to {_gib(need)} needed for {for_what}")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes < 10 * GIB else f"{num_bytes / GIB:.0f} GiB"


def memory_limit(
    groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the bytes of memory that this process may use: of its cgroups, or the machine's
    (cgroups(7)).
    """
    least = psutil.virtual_memory().total
    try:
        lines = [line.split(":", 2) for line in groups.read_text().splitlines()]
    except OSError:
        return int(least)
    for _, controllers, path in lines:
        if controllers in ("", "memory"):
            root = mounted / controllers
            for folder in (root / path.lstrip("/"), *(root / path.lstrip("/")).parents):
                for name in ("memory.max", "memory.limit_in_bytes"):
                    least = min(least, _number(folder / name) or least)
                if folder == root:
                    break
    return int(least)


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def check_gpus(plan: MachinePlan) -> Iterator[Finding]:
    """Compare the GPUs that torch sees with those that the settings need."""
    trainer, engine = plan.config.trainer, plan.config.engine
    if plan.has(Part.TRAINER) and trainer.device.startswith("cuda"):
        number = trainer.device.partition(":")[2]
        need = int(number) + 1 if number.isdecimal() else trainer.num_ranks
        yield _gpus(
            sys.executable, need, f"trainer.device = {trainer.device}", "set trainer.device"
        )
    elif plan.has(Part.TRAINER):
        yield ok("gpu", f"trainer.device = {trainer.device} needs none")
    need = engine.num_servers * engine.gpus_each
    if plan.starts_engines and engine.launch == "sglang" and need:
        setting = f"engine.gpus_each = {engine.gpus_each}"
        yield _gpus(engine.server_python, need, setting, "lower engine.num_servers")


def _gpus(python: str, need: int, setting: str, remedy: str) -> Finding:
    try:
        done = subprocess.run(
            [python, "-c", GPU_PROBE],
            capture_output=True,
            text=True,
            timeout=GPU_PROBE_S,
            check=False,
        )
        found = int(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return fail("gpu", f"{setting}: {python} cannot import torch", "install torch there")
    if found < need:
        why = f"{setting} needs {need}, and torch sees {found}"
        return fail("gpu", why, f"{remedy}, or check nvidia-smi and CUDA_VISIBLE_DEVICES")
    return ok("gpu", f"{setting} needs {need}, torch sees {found}")
