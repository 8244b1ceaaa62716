"""The engines that belong to a mesh: those of its configuration, and the operator's changes.

- A dropped engine stays out until it is added: only the operator's message brings it back.
- A file keeps the changes, so that a restarted router has the same engines. A failed write is
  logged, and `EnginesListed.is_kept` shows it.
"""

import os
from pathlib import Path

import msgspec

from rollmesh.core.addresses import is_allowed_url, why_no_engine_url
from rollmesh.core.errors import ConfigError
from rollmesh.core.logs import get_logger
from rollmesh.wire.fleet import EngineOrigin

log = get_logger()


class AddedEngine(msgspec.Struct, frozen=True):
    """An engine that the operator added."""

    url: str
    is_verified: bool = False
    """Whether its weights are those of this mesh, so that a restarted router may use them."""


class FleetChanges(msgspec.Struct, frozen=True):
    """The operator's changes of the configured engines."""

    added: tuple[AddedEngine, ...] = ()
    removed: tuple[str, ...] = ()
    """Engines that would join by the configuration, or from an allowed host."""
    draining: tuple[str, ...] = ()
    """Engines that are to be removed when their requests have ended."""


_NOT_OURS = "not an engine of this mesh; name it in engine.urls, or its host in engine.allow_hosts"


class Roster:
    """The engines that may join: by the configuration, the operator, or engine.allow_hosts."""

    def __init__(self, allow_hosts: tuple[str, ...], changes: FleetChanges) -> None:
        self.changes = changes
        self._allow_hosts = allow_hosts
        self._configured: set[str] = set()

    def configure(self, url: str) -> None:
        """Note an engine of the configuration."""
        self._configured.add(url)

    def origin(self, url: str) -> EngineOrigin:
        """Return how an engine of the fleet became one."""
        if url in self._configured:
            return EngineOrigin.CONFIGURED
        is_added = any(each.url == url for each in self.changes.added)
        return EngineOrigin.ADDED if is_added else EngineOrigin.JOINED

    def why_not(self, url: str) -> str:
        """Return why an engine may not join by itself, '' if it may."""
        if url in self.changes.removed:
            return f"{url} was removed by the operator; `rollmesh engine add {url}` adds it again"
        if self.origin(url) is not EngineOrigin.JOINED:
            return ""
        if why := why_no_engine_url(url):
            return f"{url[:200]!a}: {why}"
        return "" if is_allowed_url(url, self._allow_hosts) else f"{url}: {_NOT_OURS}"

    def add(self, url: str, *, is_launched: bool = False) -> None:
        """Let an engine join, until it is removed; see AddEngine for `is_launched`."""
        added = self.changes.added
        if is_launched:
            self.configure(url)
        elif self.origin(url) is EngineOrigin.JOINED:
            added = (*added, AddedEngine(url))
        self.changes = FleetChanges(
            added, _without(self.changes.removed, url), _without(self.changes.draining, url)
        )

    def verify(self, url: str) -> None:
        """Note that an engine has got weights of this mesh."""
        added = self.changes.added
        if AddedEngine(url, is_verified=False) in added:
            added = tuple(AddedEngine(url, True) if each.url == url else each for each in added)
            self.changes = msgspec.structs.replace(self.changes, added=added)

    def drain(self, url: str) -> None:
        """Note that an engine is to be removed when its requests have ended."""
        draining = (*_without(self.changes.draining, url), url)
        self.changes = msgspec.structs.replace(self.changes, draining=draining)

    def remove(self, url: str, *, is_launched: bool = False) -> None:
        """Keep an engine out until it is added; see DropEngine for `is_launched`."""
        if is_launched:
            self._configured.discard(url)
        added = tuple(each for each in self.changes.added if each.url != url)
        removed = _without(self.changes.removed, url)
        may_join = url in self._configured or is_allowed_url(url, self._allow_hosts)
        if may_join and not is_launched:
            removed = (*removed, url)
        self.changes = FleetChanges(added, removed, _without(self.changes.draining, url))


def _without(urls: tuple[str, ...], url: str) -> tuple[str, ...]:
    return tuple(each for each in urls if each != url)


class ChangesFile:
    """Keeps the operator's changes over a router's restart, if it has a path."""

    def __init__(self, path: Path | None) -> None:
        self.is_kept = path is not None
        """Whether the file has all changes."""
        self._path = path
        self._written = FleetChanges()

    def read(self) -> FleetChanges:
        """Return the changes of earlier routers; ConfigError if the file is not readable."""
        if self._path is None or not self._path.exists():
            return self._written
        try:
            self._written = msgspec.json.decode(self._path.read_bytes(), type=FleetChanges)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"--engine-changes {self._path}: {error}; remove the file to begin with the "
                "engines of the configuration"
            ) from None
        for each in self._written.added:
            if why := why_no_engine_url(each.url):
                raise ConfigError(f"--engine-changes {self._path}: {each.url[:200]!a}: {why}")
        return self._written

    def keep(self, changes: FleetChanges) -> None:
        """Write the changes if they are new; a failure is logged."""
        if self._path is None or changes is self._written:
            return
        self._written = changes
        part = self._path.with_name(f"{self._path.name}.part")
        try:
            with part.open("wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(changes)) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, self._path)
            self.is_kept = True
        except OSError as error:
            self.is_kept = False
            log.exception("engine_changes.not_written", path=str(self._path), error=str(error))
