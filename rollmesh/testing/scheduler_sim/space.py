"""Who stands on which GPU: the truth that no message tells.

Invariant: a GPU never has two users, whatever was promised to whom. Driven by simulated engines and
trainers, as they take memory and give it back.
"""


class Space:
    """See the module."""

    def __init__(self) -> None:
        self._users: dict[int, str] = {}

    def enter(self, user: str, gpus: tuple[int, ...]) -> None:
        """AssertionError if anybody stands there; `user` itself may."""
        for gpu in gpus:
            there = self._users.setdefault(gpu, user)
            assert there == user, f"GPU {gpu} is used by {there}, and {user} takes it"

    def leave(self, user: str) -> None:
        """From wherever it stands."""
        self._users = {gpu: each for gpu, each in self._users.items() if each != user}

    def users(self) -> dict[int, str]:
        """By GPU."""
        return dict(self._users)
