"""Judge an ended call: whether it has an answer, and if not, whether the agent is to blame.

infra_error   no answer, or a status that blames the provider, its key, its quota or its load
agent_error   404 from the API itself: the agent named a model or an object that does not exist
completed     everything else, so also a request refused as wrong, as for a full context
"""

from rollmesh.core.errors import ContentLost
from rollmesh.core.types import Outcome
from rollmesh.serve.interception.relay.call import ANSWERED, RelayCall
from rollmesh.serve.interception.relay.heard import Answer, error_in, read_answer

UPSTREAM_FAULTS = frozenset({401, 402, 403, 405, 407, 408, 409, 425, 429})
"""Statuses below 500 that do not blame the request."""


def answer_of(call: RelayCall) -> Answer:
    """The answer of a call with status 200, parsed."""
    return read_answer(call.asked.route, call.lines, call.body)


def fault_of(call: RelayCall) -> str:
    """Why an ended call got no answer, if the agent is not to blame; else ''."""
    if call.fault is None:
        try:
            call.fault = _find_fault(call)
        except ContentLost as error:
            return str(error)
    return call.fault


def outcome_of(call: RelayCall) -> Outcome:
    """How a rollout ends whose last call this is, if its finisher names no outcome."""
    if fault_of(call):
        return Outcome.INFRA_ERROR
    is_missing = call.state in ANSWERED and call.status == 404
    return Outcome.AGENT_ERROR if is_missing else Outcome.COMPLETED


def _find_fault(call: RelayCall) -> str:
    if call.state not in ANSWERED:
        is_blamed = call.failure is not None and call.failure.status >= 500
        return str(call.failure) if is_blamed else ""
    status = call.status
    if status == 200:
        return answer_of(call).failure
    is_blamed = status in UPSTREAM_FAULTS or not 400 <= status < 500
    if is_blamed or (status == 404 and not error_in(call.body)):
        return f"the upstream answered {status}"
    return ""
