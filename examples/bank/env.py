"""A bank clerk: tools that work on the rollout's own accounts.

- The reward is 1 if the accounts end as they should, whatever the model says about them, else 0.
- A refused transfer changes nothing.
"""

import random
from collections.abc import Iterator, Sequence

from rollmesh.core.types import Score, Task
from rollmesh.envs.env import Transcript
from rollmesh.envs.multi_turn import Prompt, Talk
from rollmesh.envs.tools import Function, ToolEnv

NAMES = ("ada", "bela", "carl", "dora", "emil")


class Bank:
    """The accounts of one rollout."""

    def __init__(self, accounts: dict[str, int]) -> None:
        self.accounts = dict(accounts)

    def balance(self, account: str) -> int:
        """How many cents an account holds.

        Args:
            account: the name of its owner
        """
        if account not in self.accounts:
            raise ValueError(f"no account of {account}; there are {', '.join(self.accounts)}")
        return self.accounts[account]

    def transfer(self, source: str, target: str, cents: int) -> str:
        """Move money between two accounts.

        Args:
            source: the owner who pays
            target: the owner who receives
            cents: how much, a positive number
        """
        if cents <= 0 or cents > self.balance(source):
            raise ValueError(f"{source} cannot pay {cents} cents")
        self.balance(target)
        self.accounts[source] -= cents
        self.accounts[target] += cents
        return "done"


class BankEnv(ToolEnv):
    """Move all money to one owner: the model must query each account and transfer its balance."""

    def __init__(self, *, num_accounts: int = 3, max_turns: int = 12) -> None:
        if not 2 <= num_accounts <= len(NAMES):
            raise ValueError(f"num_accounts must be 2 to {len(NAMES)}")
        super().__init__(max_turns=max_turns, system="You are a clerk. Use the tools.")
        self._num_accounts = num_accounts

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Yield tasks without end, with random owners and balances."""
        rng = random.Random(f"{split}/{seed}")
        while True:
            owners = rng.sample(NAMES, self._num_accounts)
            accounts = {owner: rng.randrange(100, 10_000) for owner in owners}
            others = " and ".join(owners[1:])
            question = f"{owners[0]} inherits all that {others} have in their accounts. Move it."
            data = {"question": question, "accounts": accounts, "heir": owners[0]}
            yield Task(id="-".join(owners), data=data)

    async def begin(self, task: Task, talk: Talk) -> Prompt:
        """Create a bank for the rollout."""
        talk.held = Bank(task.data["accounts"])
        return str(task.data["question"])

    def tools(self, talk: Talk) -> Sequence[Function]:
        """Return the tools of the rollout's bank."""
        return [talk.held.balance, talk.held.transfer]

    async def finish(self, task: Task, talk: Talk) -> None:
        """Keep the final accounts for the score."""
        del task
        if talk.held is not None:
            talk.data["accounts"] = talk.held.accounts

    async def score(self, task: Task, transcript: Transcript) -> Score:
        """Return 1 if the heir has all the money."""
        accounts = transcript.data["accounts"]
        has_all = accounts[task.data["heir"]] == sum(task.data["accounts"].values())
        names = ("num_turns", "num_tool_calls", "num_tool_errors")
        return Score(float(has_all), {name: float(transcript.data.get(name, 0)) for name in names})
