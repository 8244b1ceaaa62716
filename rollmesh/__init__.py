"""Agent rollouts for reinforcement learning of language models.

Everything in `__all__` is public. Each name is imported when it is first used, so `import rollmesh`
is fast and loads neither torch nor zmq.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmesh.core.config import Config, load_config
    from rollmesh.core.errors import AgentFailed, GroupError, InfraError, RollmeshError, UserError
    from rollmesh.core.types import Outcome, Score, Task
    from rollmesh.envs.chat import ChatClient
    from rollmesh.envs.env import Endpoint, Env, Sibling, Transcript
    from rollmesh.envs.harness import HarnessEnv
    from rollmesh.envs.loading import load_env
    from rollmesh.envs.multi_turn import MultiTurnEnv, SingleTurnEnv
    from rollmesh.envs.tasks import read_tasks, rounds
    from rollmesh.envs.tools import ToolEnv
    from rollmesh.serve.client.arrivals import Dropped, Finished
    from rollmesh.serve.client.async_client import AsyncRolloutClient
    from rollmesh.serve.client.client import RolloutClient
    from rollmesh.serve.client.gateway import Gateway, GatewaySession
    from rollmesh.serve.client.sync_client import SyncRolloutClient

__version__ = "0.1.0"

__all__ = [
    "AgentFailed",
    "AsyncRolloutClient",
    "ChatClient",
    "Config",
    "Dropped",
    "Endpoint",
    "Env",
    "Finished",
    "Gateway",
    "GatewaySession",
    "GroupError",
    "HarnessEnv",
    "InfraError",
    "MultiTurnEnv",
    "Outcome",
    "RollmeshError",
    "RolloutClient",
    "Score",
    "Sibling",
    "SingleTurnEnv",
    "SyncRolloutClient",
    "Task",
    "ToolEnv",
    "Transcript",
    "UserError",
    "__version__",
    "load_config",
    "load_env",
    "read_tasks",
    "rounds",
]

TARGETS = (
    "rollmesh.core.config:Config",
    "rollmesh.core.config:load_config",
    "rollmesh.core.errors:AgentFailed",
    "rollmesh.core.errors:GroupError",
    "rollmesh.core.errors:InfraError",
    "rollmesh.core.errors:RollmeshError",
    "rollmesh.core.errors:UserError",
    "rollmesh.core.types:Outcome",
    "rollmesh.core.types:Score",
    "rollmesh.core.types:Task",
    "rollmesh.envs.chat:ChatClient",
    "rollmesh.envs.env:Endpoint",
    "rollmesh.envs.env:Env",
    "rollmesh.envs.env:Sibling",
    "rollmesh.envs.env:Transcript",
    "rollmesh.envs.harness:HarnessEnv",
    "rollmesh.envs.loading:load_env",
    "rollmesh.envs.multi_turn:MultiTurnEnv",
    "rollmesh.envs.multi_turn:SingleTurnEnv",
    "rollmesh.envs.tasks:read_tasks",
    "rollmesh.envs.tasks:rounds",
    "rollmesh.envs.tools:ToolEnv",
    "rollmesh.serve.client.arrivals:Dropped",
    "rollmesh.serve.client.arrivals:Finished",
    "rollmesh.serve.client.async_client:AsyncRolloutClient",
    "rollmesh.serve.client.client:RolloutClient",
    "rollmesh.serve.client.gateway:Gateway",
    "rollmesh.serve.client.gateway:GatewaySession",
    "rollmesh.serve.client.sync_client:SyncRolloutClient",
)
"""Where each public name is defined, as `module:name`."""

_MODULES = {name: module for module, _, name in (target.partition(":") for target in TARGETS)}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
