"""What an environment is, the built-in ones, and the thin agent client they use.

Plain values in and out: no sockets of ours, no tensors. A worker drives an environment; an
environment drives its agent against the session's `base_url`, as any outside agent would.
"""

from rollmesh.envs.files import read_bytes as read_bytes
from rollmesh.envs.files import read_text as read_text
