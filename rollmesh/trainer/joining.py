"""Ranks that are started elsewhere than by the trainer: how both find each other.

    torchrun ... -m rollmesh train      rank 0: the trainer, and the process of its rank
                                        others: read its address in torchrun's store, and dial it
    rollmesh rank --controller ADDRESS  dials ADDRESS

- A rank takes from elsewhere only where the trainer listens. What it imports and computes is in its
  own settings, and the trainer refuses one whose settings differ.
- A rank has the trainer's own key file, and proves that the trainer has it too: torchrun's store
  has no keys.
"""

import datetime
import os
import secrets
import socket
from collections.abc import Mapping
from typing import Self

import msgspec
import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store  # torch.distributed does not export it
from torch.distributed.rendezvous import rendezvous

from rollmesh.core.addresses import (
    address_towards,
    is_loopback,
    own_address,
    split_address,
    with_host,
)
from rollmesh.core.config import Config
from rollmesh.core.errors import AddressError, ConfigError, UserError
from rollmesh.core.logs import get_logger, setup
from rollmesh.trainer.ranks import resolve_device
from rollmesh.wire.keys import Keys, Role, check_dial, read_keys
from rollmesh.wire.sockets import SERVER_KEY, check_admitted

log = get_logger()

ADDRESS_KEY = "rollmesh/controller"
REPORT_S = 10.0
SECRET_BYTES = 16


class TorchrunJob:
    """The environment in which torchrun started this process, and its store."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Raise ConfigError for a variable that is not a number."""
        self._environment = environment
        self.rank = self._number("RANK")
        self.num_ranks = self._number("WORLD_SIZE")
        self.local_rank = self._number("LOCAL_RANK")
        self.num_sharing = self._number("LOCAL_WORLD_SIZE")
        """Ranks of this host, which see the same GPUs."""
        self._master = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        self._store: Store | None = None

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """Return the job of this process; None if no torchrun started it, or only this one."""
        job = cls(environment) if all(name in environment for name in VARIABLES) else None
        return job if job and job.num_ranks > 1 else None

    def host(self, router: str) -> str:
        """Return the address of this machine that faces the other ranks.

        Raises ConfigError if ranks are on other machines, and only loopback is known here.
        """
        found = address_towards(self._environment["MASTER_ADDR"]) or own_address()
        if is_loopback(found) and self.num_sharing < self.num_ranks:
            found = address_towards(split_address(router)[0]) or own_address()
            if is_loopback(found):
                raise ConfigError(
                    f"MASTER_ADDR of {self._master} is this machine's loopback, which ranks on "
                    "other machines cannot dial; set trainer.rank_bind = tcp://ADDRESS:0"
                )
        return found

    def applied(self, config: Config) -> Config:
        """Return the settings for as many ranks as torchrun started; ConfigError if
        trainer.num_ranks is set to another number.

        They are not those of the run's folder, so the run may resume with other ranks.
        """
        num_ranks = config.trainer.num_ranks
        if num_ranks not in (1, self.num_ranks):
            raise ConfigError(
                f"trainer.num_ranks = {num_ranks}, and torchrun started {self.num_ranks} "
                "processes; leave it out, or set the number of all processes"
            )
        trainer = msgspec.structs.replace(
            config.trainer, num_ranks=self.num_ranks, num_local_ranks=1
        )
        return msgspec.structs.replace(config, trainer=trainer)

    def publish(self, address: str) -> None:
        """Pass the trainer's address on to the other ranks."""
        self._open().set(ADDRESS_KEY, address.partition(SERVER_KEY)[0])

    def address(self) -> str:
        """Wait for the trainer's address; UserError if torchrun's store ends first."""
        store = self._open()
        while True:
            try:
                store.wait([ADDRESS_KEY], datetime.timedelta(seconds=REPORT_S))
                return bytes(store.get(ADDRESS_KEY)).decode()
            except dist.DistStoreError:
                log.info("rank.waiting", rank=self.rank, why="rank 0 does not listen yet")
            except RuntimeError as error:
                raise self._lost(error) from None

    def _open(self) -> Store:
        if self._store is None:
            try:
                self._store, _, _ = next(rendezvous("env://"))
            except RuntimeError as error:
                raise self._lost(error) from None
        return self._store

    def _lost(self, error: RuntimeError) -> UserError:
        why = str(error).partition("\n")[0]
        return UserError(f"torchrun's store at {self._master} does not answer: {why}")

    def _number(self, name: str) -> int:
        try:
            return int(self._environment[name])
        except ValueError:
            raise ConfigError(f"{name}={self._environment[name]}: not a number") from None


def numeric(bind: str) -> str:
    """Return `bind` with an address of this machine for the name of a network interface."""
    for each in psutil.net_if_addrs().get(split_address(bind)[0], ()):
        if each.family == socket.AF_INET:
            return with_host(bind, each.address)
    return bind


VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Set by torchrun."""


def run_rank(
    config: Config, rank: int, address: str, local_rank: int = 0, num_sharing: int = 1
) -> int:
    """Join the trainer at `address` as its rank `rank`, and serve it; return the exit code.

    `local_rank` counts the ranks of this host, of which `num_sharing` see the same GPUs. Raises
    UserError in one line if the rank cannot join.
    """
    from rollmesh.trainer.controller.rank import RankProcess  # noqa: PLC0415 - not for rank 0
    from rollmesh.trainer.controller.spec import rank_device  # noqa: PLC0415 - not for rank 0
    from rollmesh.trainer.ranked import rank_plan  # noqa: PLC0415 - not for rank 0

    trainer, folder = config.trainer, config.run_folder()
    if not 0 < rank < trainer.num_ranks:
        raise ConfigError(
            f"rank {rank}: trainer.num_ranks = {trainer.num_ranks} has ranks 1 to "
            f"{trainer.num_ranks - 1} besides the trainer's own"
        )
    setup(f"rank-{rank}", folder, on_console=True)
    keys = read_keys(role=Role.PUBLISHER)
    target = dialled(address, keys)
    kind = str(resolve_device(trainer.device, num_sharing))
    device = rank_device(kind, local_rank, torch.cuda.device_count(), num_sharing)
    spec = msgspec.structs.replace(
        rank_plan(config.model.path, trainer, folder, device).spec(target, rank, device),
        secret=secrets.token_hex(SECRET_BYTES),
        is_external=True,
    )
    return RankProcess(spec, keys).run()


def dialled(address: str, keys: Keys | None) -> str:
    """Return the trainer's address with the public key that it must prove.

    Raises AddressError if it is on another machine and there are no keys, or it refuses ours.
    """
    target = address.partition(SERVER_KEY)[0]
    check_dial(target, keys)
    if keys and keys.public != keys.hub_public:
        target = f"{target}{SERVER_KEY}{keys.public}"
    try:
        check_admitted(target, keys)
    except AddressError as error:
        raise AddressError(f"{error}; a rank needs the trainer's own key file") from None
    return target
