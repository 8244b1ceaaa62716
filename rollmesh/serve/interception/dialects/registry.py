"""The registered dialects. A new dialect is one file with its class, and one `register` call here.

- The gateway's routes and the relay's routes, answer parsers, end events and history keys are read
  from the registered objects.
- A route that ends with another dialect's route precedes it in DIALECTS.
"""

from rollmesh.serve.interception.dialects.chat import ChatDialect
from rollmesh.serve.interception.dialects.completions import CompletionsDialect
from rollmesh.serve.interception.dialects.dialect import Dialect
from rollmesh.serve.interception.dialects.messages import MessagesDialect
from rollmesh.serve.interception.dialects.responses import ResponsesDialect

DIALECTS: dict[str, Dialect] = {}
"""By route."""
COUNT_DIALECTS: dict[str, Dialect] = {}
"""By the route that counts the tokens of a request."""
DEFAULT_DIALECT: Dialect = ChatDialect()
"""Encodes errors of requests without a dialect."""


def register(dialect: Dialect) -> None:
    """Serve a dialect; ValueError if its route is taken."""
    if dialect.route in DIALECTS:
        raise ValueError(f"{dialect.route}: a dialect with this route is registered")
    known = [*DIALECTS.values(), dialect]
    DIALECTS.clear()
    DIALECTS.update({d.route: d for d in sorted(known, key=lambda d: -len(d.route))})
    if dialect.count_route:
        COUNT_DIALECTS[dialect.count_route] = dialect


def dialect_of(path: str) -> Dialect | None:
    """The dialect that a request path ends with the route of."""
    for route, dialect in DIALECTS.items():
        if path.endswith(route):
            return dialect
    return None


for _dialect in (DEFAULT_DIALECT, CompletionsDialect(), ResponsesDialect(), MessagesDialect()):
    register(_dialect)
