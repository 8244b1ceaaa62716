"""Whether a message may change the pipeline that it names: it carries that pipeline's token.

- The scheduler knows a token by its hash alone, which is journalled with the pipeline.
- The operator's token, which the admission process has, is good for every pipeline, and registers
  them. Without one (a simulator) pipelines may be registered without tokens, and need none then.
- A message that is refused changes nothing, and is answered in one line where it has an answer.
"""

import hmac

from rollmesh.core.secret_file import hash_token
from rollmesh.scheduler.service.book import Book
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.scheduling import (
    AdmissionMessage,
    CoordinatorHello,
    HooksWired,
    NotifyReleaseGpus,
    NotifyReleaseThenRequestGpus,
    RegisterPipeline,
    RequestGpus,
    SchedulerAnswered,
    SchedulerHello,
    TakeGpus,
    TicketMoved,
    TicketState,
    WithdrawRequest,
)

REMEDY = (
    "`rollmesh scheduler register` keeps it in tokens/ of the journal's folder; name that file by "
    "--pipeline-token or ROLLMESH_PIPELINE_TOKEN_FILE"
)


class Tokens:
    """Checks the token of each message that changes a pipeline."""

    def __init__(self, book: Book, operator_hash: str = "") -> None:
        self._book = book
        self._operator_hash = operator_hash

    def is_refused(self, route: bytes, message: AnyMessage) -> bool:
        """Whether it must not be carried out; then the sender is told why."""
        token: str | None = getattr(message, "token", None)
        why = "" if token is None else self._fault(message, hash_token(token))
        if why:
            self._answer(route, message, why)
        return bool(why)

    def _fault(self, message: AnyMessage, shown: str) -> str:
        if self._operator_hash and hmac.compare_digest(shown, self._operator_hash):
            return ""
        if isinstance(message, RegisterPipeline):
            why = "only the admission process of this scheduler registers pipelines"
            return why if self._operator_hash else ""
        name = self._name(message)
        tenant = self._book.tenants.get(name)
        if tenant is None:  # its handler knows what to answer
            return ""
        if not tenant.token_hash:
            why = f"{name} was registered without a token; register it again"
            return why if self._operator_hash else ""
        if hmac.compare_digest(shown, tenant.token_hash):
            return ""
        return f"the token of {name} is {'wrong' if shown else 'missing'}: {REMEDY}"

    def _name(self, message: AnyMessage) -> str:
        """The pipeline that it would change; '' where that is unknown."""
        if isinstance(message, TakeGpus | WithdrawRequest):
            ticket = self._book.tickets.get(message.key)
            return ticket.pipeline_id if ticket else ""
        return getattr(message, "pipeline_id", "")

    def _answer(self, route: bytes, message: AnyMessage, why: str) -> None:
        match message:
            case HooksWired() | CoordinatorHello():
                hello = SchedulerHello(self._book.incarnation, error=why)
                self._book.send(route, hello)
            case (
                RequestGpus(key)
                | NotifyReleaseGpus(key)
                | NotifyReleaseThenRequestGpus(key)
                | TakeGpus(key)
                | WithdrawRequest(key)
            ):
                self._book.send(route, TicketMoved(key, TicketState.REFUSED, reason=why))
            case _ if isinstance(message, AdmissionMessage):
                self._book.send(route, SchedulerAnswered(message.key, False, why))
