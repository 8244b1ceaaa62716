"""Every error that rollmesh raises on purpose, as one small tree.

    RollmeshError
      UserError            the user's mistake: one clear line, exit code 2 (also a ValueError)
        ConfigError        an unknown, mistyped or contradictory setting
        EnvError           an environment that cannot be imported or does not keep to the interface
        ModelError         a model folder that is not one, or of a type we do not run
        AddressError       an address in use, not reachable, or not allowed
      WireError            a frame that does not parse; counted and answered, never fatal
      EngineError          an engine refused, failed or vanished
        EngineUnavailable  no engine is READY, or it did not answer
          EngineOverloaded its queue is full
          EngineBroke      it took the request and failed at it
        EngineRefused      the engine answered that this request is wrong
      SessionError         what the HTTP edge turns into a reply in the caller's dialect
      JournalError         a journal that cannot be written or is of another format
      Overloaded           a bounded queue is full; `retry_after_s` says when to come back
      InfraError           a rollout failed for reasons that are not the agent's
      AgentFailed          a rollout failed and the agent itself is at fault

Invariant: a message names the key, address or file and says what to do. `assert` is for our own
mistakes. Driven by everyone.
"""


class RollmeshError(Exception):
    """Root of the tree."""


class UserError(RollmeshError, ValueError):
    """The user can mend this; the message is one line that says how."""


class ConfigError(UserError):
    """A setting is unknown, mistyped or contradicts another."""


class EnvError(UserError):
    """An environment cannot be imported or does not keep to the interface."""


class ModelError(UserError):
    """A model folder is not one, or holds an architecture that we do not run."""


class AddressError(UserError):
    """An address is in use, does not answer, or is not allowed without keys."""


class WireError(RollmeshError):
    """A message does not parse: wrong frame count, unknown tag, wrong protocol version."""


class EngineError(RollmeshError):
    """An engine refused, failed or vanished."""


class EngineUnavailable(EngineError):
    """No engine is READY, or the chosen one did not answer; worth a retry."""


class EngineOverloaded(EngineUnavailable):
    """The engine's queue is full; worth a retry elsewhere, or later."""


class EngineBroke(EngineUnavailable):
    """The engine took the request and failed before its first token; perhaps the request is why."""


class EngineRefused(EngineError):
    """The engine says that the request itself is wrong; a retry would fail alike."""


class SessionError(RollmeshError):
    """A request to a session fails with `status` and a machine-readable `code`."""

    def __init__(
        self, status: int, code: str, message: str, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s

    def again(self) -> "SessionError":
        """The same to raise: one that is kept and raised keeps all its callers' frames alive."""
        return SessionError(self.status, self.code, str(self), self.retry_after_s)


class JournalError(RollmeshError):
    """A journal cannot be written, or the file is of another format."""


class Overloaded(RollmeshError):
    """A bounded queue is full."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class InfraError(RollmeshError):
    """A rollout failed for reasons that are not the agent's; it is retried, never scored zero."""


class AgentFailed(RollmeshError):
    """An agent broke down by its own fault; its rollout ends as `agent_error`."""
