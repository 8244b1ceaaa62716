"""A run folder as a demo run would leave it, with made-up lines.

- The figures are seeded: rewards rise, memory stays flat, samples have ages 0 to 2.
- Every method appends what the processes of the run would append.
"""

import random
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel as ByteSplitter

from rollmesh.core.config import Config, ModelConfig, RunConfig, TrainerConfig, write_config
from rollmesh.core.run_state import STATE_FILE, RunRecord, RunState
from rollmesh.wire.worker_report import WorkerStatus

START_S = 1_700_000_000.0
ROLES = ("engine-0", "router", "worker-0", "worker-1", "trainer", "dashboard")
SPECIAL = ("<|im_start|>", "<|im_end|>")
OPENING = "Guess my number from 1 to 7. You have 3 guesses."
MIB = 2**20
DONE = RunRecord(state=RunState.DONE)


class FakeRun:
    """Writes a plausible run, as much of it as a test requests."""

    def __init__(
        self, folder: Path, num_steps: int = 200, seed: int = 0, is_dense: bool = False
    ) -> None:
        """`is_dense`: rewards are a tenth of the normal ones, and success is unknown."""
        self.is_dense = is_dense
        self.folder = folder
        self.num_steps = num_steps
        self.now_s = START_S
        self.num_rollouts = 0
        self._step = 0
        self._random = random.Random(seed)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model").mkdir(exist_ok=True)
        self.tokenizer = byte_tokenizer()
        self.tokenizer.save(str(folder / "model" / "tokenizer.json"))
        config = Config(
            run=RunConfig(name=folder.name, folder=str(folder.parent)),
            model=ModelConfig(path=str(folder / "model")),
            trainer=TrainerConfig(num_steps=num_steps),
        )
        write_config(config, folder / "config.json")

    def add_baseline(self, reward: float = 0.66) -> None:
        """Append the trainer's evaluation before the first step."""
        row = {"time_s": self.now_s, "step": -1, "reward_untrained": reward}
        self.append("metrics.jsonl", row | self._if_known(success_untrained=reward))

    def _if_known(self, **figures: float) -> dict[str, float]:
        """Success figures; empty if rewards are not 0 or 1."""
        return {} if self.is_dense else figures

    def add_steps(self, count: int) -> None:
        """Append train steps, one telemetry line and a few rollouts each."""
        for _ in range(count):
            self.now_s += 1.0
            self.append("metrics.jsonl", self._metrics())
            self.append("telemetry.jsonl", self._telemetry())
            self.add_rollout(step=self._step)
            self._step += 1

    def add_rollout(
        self,
        step: int | None = None,
        messages: list[dict[str, Any]] | None = None,
        **fields: Any,
    ) -> str:
        """Append a game and return its id, optionally with other `messages` and other fields of its
        row.
        """
        played, sample, won = self._game()
        rollout_id = f"r0/{self.num_rollouts // 16}/{self.num_rollouts % 16}"
        self.num_rollouts += 1
        row = {
            "time_s": self.now_s,
            "rollout_id": rollout_id,
            "task_id": f"guess-{self._random.randint(1, 7)}",
            "outcome": "completed",
            "reward": won * self._most(),
            **self._if_known(success=float(won)),
            "metrics": {"num_guesses": 2.0},
            "num_calls": sum(message["role"] == "assistant" for message in played),
            "step": step,
            "worker_id": f"worker-{self.num_rollouts % 2}",
            "messages": played if messages is None else messages,
            "samples": [sample],
            "env": "guess",
            "length": sum(sample["loss_mask"]),
            "num_masked": 0,
        }
        self.append("trajectories.jsonl", row | fields)
        return rollout_id

    def add_failure(self, error: str, place: dict[str, Any] | None) -> str:
        """Append a rollout whose environment raised `error` at `place`; return its id."""
        row = {
            "time_s": self.now_s,
            "group_id": f"failed/{self.num_rollouts}",
            "num_rollouts": 1,
            "reason": f"agent_error: {error}",
            "index": 0,
            "task_id": "guess-3",
            "outcome": "agent_error",
            "error": error,
            "place": place,
        }
        self.append("drops.jsonl", row)
        return f"{row['group_id']}/0"

    def add_drop(self, task_id: str, length: int, age: int) -> None:
        """Append a group of one rollout that was too old to train."""
        row = {
            "time_s": self.now_s,
            "group_id": f"dropped/{task_id}",
            "num_rollouts": 1,
            "reason": f"stale: age {age}",
            "index": 0,
            "task_id": task_id,
            "env": "guess",
            "length": length,
            "age": age,
        }
        self.append("drops.jsonl", row)

    def finish(self, record: RunRecord = DONE) -> None:
        """Write the summary and the state that end a run."""
        summary: dict[str, Any] = {"reward_untrained": 0.66, "reward_last10": 0.96}
        summary |= self._if_known(success_untrained=0.66, success_last10=0.96) | {"num_lost": 0}
        (self.folder / "summary.json").write_bytes(msgspec.json.encode(summary))
        self.write_record(record)

    def write_record(self, record: RunRecord) -> None:
        """Write state.json."""
        (self.folder / STATE_FILE).write_bytes(msgspec.json.encode(record))

    def append(self, name: str, row: Any) -> None:
        """Append one line to a file of the folder."""
        with (self.folder / name).open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")

    def _most(self) -> float:
        """Reward of a won game."""
        return 0.1 if self.is_dense else 1.0

    def _success(self) -> float:
        return 0.66 + 0.31 * (1 - 0.97**self._step)

    def _metrics(self) -> dict[str, Any]:
        won = sum(self._random.random() < self._success() for _ in range(256))
        old = self._random.randint(10, 60)
        return {
            "time_s": self.now_s,
            "step": self._step,
            "policy_version": self._step + 1,
            "reward": won / 256 * self._most(),
            **self._if_known(success=won / 256),
            "env/num_guesses": 2.5,
            "num_samples": 256,
            "num_rollouts": 256,
            "age_histogram": {"0": 80 - old // 2, "1": 176 - old + old // 2, "2": old},
            "max_age": 2,
            "share_two_versions": 0.21,
            "loss": self._random.gauss(0.0, 0.02),
            "entropy": 1.2 * 0.99**self._step,
            "step_s": 0.2,
            "wait_s": 0.6,
            "logprob_gap_max": 2e-6,
        }

    def _telemetry(self) -> dict[str, Any]:
        base = dict(zip(ROLES, (410, 62, 88, 91, 520, 48), strict=True))
        processes = [
            {"role": role, "pid": 100 + at, "rss_bytes": (base[role] + at) * MIB, "cpu_s": 1.0}
            for at, role in enumerate(ROLES)
        ]
        workers = [self._worker(number) for number in range(2)]
        engine: dict[str, Any] = {"url": "http://127.0.0.1:30000", "phase": "READY"}
        engine |= {"policy_version": self._step + 1, "num_running": 61, "num_waiting": 3}
        router = {
            "incarnation": "i0",
            "workers": workers,
            "queue": {"queued": 12, "assigned": 2, "running": 30},
            "num_done": 16 * self._step,
            "engines": [engine],
        }
        return {"time_s": self.now_s, "processes": processes, "router": router}

    def _worker(self, number: int) -> dict[str, Any]:
        worker: dict[str, Any] = msgspec.to_builtins(
            WorkerStatus(
                f"worker-{number}",
                env="guess",
                state="ready",
                in_flight=self._random.randint(50, 64),
                num_finished=128 * self._step,
                num_calls=(290 + number) * self._step,
                num_tokens=620 * self._step,
                loop_lag_s=0.0012,
                rss_bytes=(88 + number) * MIB,
                held_bytes=40_000,
                pid=102 + number,
            )
        )
        return worker

    def _game(self) -> tuple[list[dict[str, Any]], dict[str, Any], bool]:
        """Return the messages, their one sample, and whether the game was won."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": OPENING}]
        sample: dict[str, Any] = {
            "token_ids": [],
            "logprobs": [],
            "loss_mask": [],
            "policy_versions": [],
        }
        num_turns = self._random.randint(1, 3)
        for turn in range(num_turns):
            self._extend(sample, f"<|im_start|>user\n{messages[-1]['content']}<|im_end|>\n")
            self._extend(sample, "<|im_start|>assistant\n")
            guess = str(self._random.randint(1, 7))
            self._extend(sample, f"{guess}<|im_end|>", policy_version=self._step + turn // 2)
            self._extend(sample, "\n")
            messages.append({"role": "assistant", "content": guess})
            if turn < num_turns - 1:
                messages.append(
                    {"role": "user", "content": self._random.choice(["higher", "lower"])}
                )
        return messages, sample, self._random.random() < self._success()

    def _extend(self, sample: dict[str, Any], text: str, policy_version: int | None = None) -> None:
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        is_sampled = policy_version is not None
        sample["token_ids"] += ids
        sample["loss_mask"] += [int(is_sampled)] * len(ids)
        sample["policy_versions"] += [policy_version if is_sampled else -1] * len(ids)
        sample["logprobs"] += [-self._random.expovariate(1.2) if is_sampled else 0.0 for _ in ids]


def byte_tokenizer() -> Tokenizer:
    """One token per byte, and the chat marks."""
    alphabet = sorted(ByteSplitter.alphabet())
    tokenizer = Tokenizer(BPE({char: at for at, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = ByteSplitter(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer
