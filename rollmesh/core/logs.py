"""Logging: JSON lines in the run folder, and a console form for people.

- An event is named `noun.verbed` and carries ids as keys: `log.info("group.assigned", group_id=...,
  worker_id=...)`. Standard logging, such as aiohttp's, gets the same shape.
- Registered secrets are replaced in every line; core/redaction.py has the limits. Control
  characters never reach a terminal.
- A log file is bounded. A full disk or a closed terminal loses lines and raises nothing.
- `setup` is for processes of rollmesh. In other programs that use the client, events go to the
  standard library's logging.
"""

import json
import logging
import logging.handlers
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any, TextIO, cast

import msgspec

from rollmesh.core.redaction import HIDDEN, redact
from rollmesh.core.text import printable, printable_json, printable_lines


@contextmanager
def _unseen(name: str) -> Iterator[None]:
    if name in sys.modules:
        yield
        return
    sys.modules[name] = cast("Any", None)
    try:
        yield
    finally:
        del sys.modules[name]


# structlog imports rich if it is installed, for tracebacks that we do not want: half of its import
# time and 5 MB in every process. It works without when the import fails.
with _unseen("rich"):
    import structlog

Event = MutableMapping[str, Any]
Logger = structlog.typing.FilteringBoundLogger

MAX_FILE_BYTES = 32 * 2**20
"""A role's log is rotated once at this size: at most twice as much stays on disk."""

MAX_KEYS = 256
"""Keys that an `Occasional` counts by themselves; further ones are counted together."""

_HANDLER = "rollmesh."
_SECRET_KEYS = frozenset(
    {"api_key", "path_secret", "secret", "authorization", "x-api-key", "password", "admin_token"}
)


def get_logger() -> Logger:
    """Return the logger of a module: `log = get_logger()` at its top."""
    return cast("Logger", structlog.get_logger())


class Occasional:
    """Decides which of many equal events are logged, so that peers cannot rotate a log away.

    Of the events of a key, the first, second, fourth, eighth... are logged.
    """

    def __init__(self) -> None:
        self._counts: dict[object, int] = {}

    def number(self, key: object) -> int:
        """Count an event of `key`. Return its number if it is to be logged, else 0."""
        if key not in self._counts and len(self._counts) >= MAX_KEYS:
            key = ""
        count = self._counts[key] = self._counts.get(key, 0) + 1
        return 0 if count & (count - 1) else count


def setup(role: str, folder: Path | None, on_console: bool | None = None) -> None:
    """Send this process's events to `folder/logs/<role>.log` and, for people, to stderr.

    The console form is written where stderr is a terminal or there is no folder, unless
    `on_console` says otherwise. A second call replaces the first.
    """
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        _Role(role),
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.stdlib.ExtraAdder(),
        _hide_keys,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for handler in [h for h in root.handlers if (h.name or "").startswith(_HANDLER)]:
        root.removeHandler(handler)
        handler.close()
    if folder:
        path = folder / "logs" / f"{role}.log"
        try:
            root.addHandler(_file_handler(path, shared))
        except OSError as error:
            _say_lost(path, error)
            on_console = True
    if on_console is None:
        on_console = folder is None or sys.stderr.isatty()
    if on_console:
        root.addHandler(_console_handler(shared))
    root.setLevel(logging.INFO)
    logging.getLogger("aiohttp.server").addFilter(_is_no_peers_fault)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request, else
    logging.captureWarnings(True)


_PEER_ERRORS = ("aiohttp.http_exceptions", "aiohttp.client_exceptions", "aiohttp.web_protocol")
"""Modules whose exceptions, in aiohttp's server, are about what a peer sent."""


def _is_no_peers_fault(record: logging.LogRecord) -> bool:
    """Return False for records about a malformed request or a closed connection.

    aiohttp logs each as an error with a traceback, so strangers could rotate a log away.
    """
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__module__ not in _PEER_ERRORS


class _Role:
    """Adds the process's role to every event."""

    def __init__(self, role: str) -> None:
        self._role = role

    def __call__(self, _logger: Any, _method: str, event: Event) -> Event:
        event.setdefault("role", self._role)
        return event


def _hide_keys(_logger: Any, _method: str, event: Event) -> Event:
    for key, value in event.items():
        if key.lower() in _SECRET_KEYS:
            event[key] = HIDDEN
        elif isinstance(value, dict):
            event[key] = _hide_keys(None, "", dict(value))
    return event


def _escape_values(_logger: Any, _method: str, event: Event) -> Event:
    """Escape control characters, except newlines of tracebacks."""
    for key, value in event.items():
        if isinstance(value, str):
            is_long = key in ("exception", "stack")
            event[key] = printable_lines(value) if is_long else printable(value)
    return event


def _plain_traceback(stream: TextIO, exc_info: structlog.typing.ExcInfo) -> None:
    text = StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    stream.write(printable_lines(text.getvalue()))


class _Hiding(structlog.stdlib.ProcessorFormatter):
    """Redacts the finished line, so that a traceback cannot contain a secret either."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _LogFile(logging.handlers.RotatingFileHandler):
    """A handler that loses events to a full disk and prints one line to stderr."""

    has_complained = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Handle an event that could not be written."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.has_complained:
            self.has_complained = True
            _say_lost(Path(self.baseFilename), error)


def _say_lost(path: Path, error: OSError) -> None:
    with suppress(OSError):
        sys.stderr.write(
            f"rollmesh: {path}: {error.strerror}; events are lost until it can be written\n"
        )


def _as_text(_logger: Any, _method: str, event: Event) -> str:
    """Format as `noun.verbed key=value ...`, for a log that is not ours."""
    name, traceback = event.pop("event"), event.pop("exception", None)
    line = printable(" ".join([str(name), *(f"{key}={value}" for key, value in event.items())]))
    return redact(f"{line}\n{printable_lines(traceback)}" if traceback else line)


def _speak_as_a_library() -> None:
    """Send events to standard logging: structlog's default prints to stdout, and raises if that is
    closed.
    """
    if not structlog.is_configured():
        structlog.configure(
            processors=[_hide_keys, structlog.processors.format_exc_info, _as_text],
            wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
            logger_factory=structlog.stdlib.LoggerFactory(),
            cache_logger_on_first_use=False,
        )


_speak_as_a_library()


def _file_handler(path: Path, shared: list[Any]) -> logging.Handler:
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path, maxBytes=MAX_FILE_BYTES, backupCount=1, encoding="utf-8")
    handler.name = f"{_HANDLER}file"
    handler.setFormatter(
        _Hiding(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(serializer=_to_json),
            ],
        )
    )
    return handler


def _console_handler(shared: list[Any]) -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.name = f"{_HANDLER}console"
    renderer = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(),
        timestamp_key="time",
        exception_formatter=_plain_traceback,
    )
    handler.setFormatter(
        _Hiding(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _escape_values,
                renderer,
            ],
        )
    )
    return handler


def _to_json(event: Event, **_: Any) -> str:
    try:
        text = msgspec.json.encode(event, enc_hook=str, order="deterministic").decode()
        return printable_json(text)
    except UnicodeEncodeError:  # half a surrogate pair, as in the name of a file
        text = json.dumps(event, default=str, ensure_ascii=False, sort_keys=True)
        return printable_json(readable(text))


def readable(text: str) -> str:
    """Encode `text` as UTF-8; unencodable characters become question marks."""
    return text.encode(errors="replace").decode()
