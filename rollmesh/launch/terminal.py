"""The console for a person's terminal.

Text of agents, models and peers cannot control the terminal: every piece of text passes through
`printable` before it is styled.
"""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from rollmesh.core.printable import printable_lines


class Terminal(Console):
    """A rich console whose text has no control characters but newlines."""

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments of `renderable`, their text escaped."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield segment._replace(text=printable_lines(segment.text))
