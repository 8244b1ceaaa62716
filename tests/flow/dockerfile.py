"""Reads docker/Dockerfile: its stages, what each copies, and what its images run.

Owns what we use of the format. Invariant: a stage says what it inherits too, as an image does.
Driven by test_docker.py.
"""

import json
from pathlib import Path
from typing import NamedTuple

import msgspec


class Instruction(NamedTuple):
    """One of a stage, its continued lines joined."""

    word: str
    rest: str

    def words(self) -> list[str]:
        """The list of an instruction in exec form."""
        return msgspec.convert(json.loads(self.rest[self.rest.index("[") :]), list[str])


class Stages:
    """All stages of a Dockerfile by name."""

    def __init__(self, path: Path) -> None:
        self._base: dict[str, str] = {}
        self._own: dict[str, list[Instruction]] = {}
        name = ""
        for word, rest in _instructions(path.read_text()):
            if word == "FROM":
                base, _, name = rest.partition(" AS ")
                self._base[name], self._own[name] = base, []
            elif name:
                self._own[name].append(Instruction(word, rest))

    def names(self) -> list[str]:
        """In the order of the file; the last is built where none is named."""
        return list(self._own)

    def last(self, stage: str, word: str) -> Instruction:
        """The instruction of this word that holds in an image of `stage`."""
        while stage in self._own:
            for instruction in reversed(self._own[stage]):
                if instruction.word == word:
                    return instruction
            stage = self._base[stage]
        raise KeyError(word)

    def environment(self, stage: str) -> dict[str, str]:
        """The variables of an image of `stage`."""
        own = [i.rest for i in self._own.get(stage, []) if i.word == "ENV"]
        pairs = [pair.split("=", 1) for rest in own for pair in rest.split()]
        below = self.environment(self._base[stage]) if stage in self._base else {}
        return below | dict(pairs)

    def context_files(self) -> list[str]:
        """What the build copies out of the repository."""
        copies = [i.rest.split() for own in self._own.values() for i in own if i.word == "COPY"]
        return [each for words in copies if "--from" not in words[0] for each in words[:-1]]

    def copied_from(self, stage: str) -> list[str]:
        """The stages whose files `stage` takes over."""
        copies = [i.rest.split()[0] for i in self._own[stage] if i.word == "COPY"]
        return [each.removeprefix("--from=") for each in copies if each.startswith("--from=")]

    def runs(self, stage: str) -> str:
        """All that is run to make `stage`."""
        text = ""
        while stage in self._own:
            text += "\n".join(i.rest for i in self._own[stage] if i.word == "RUN")
            stage = self._base[stage]
        return text


def _instructions(text: str) -> list[Instruction]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [Instruction(*line.strip().split(maxsplit=1)) for line in whole]
