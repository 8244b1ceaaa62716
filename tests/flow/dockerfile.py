"""Read docker/Dockerfile: its stages, the files that each copies, and the commands of its images.

A stage includes what it inherits, as an image does.
"""

import json
from pathlib import Path
from typing import NamedTuple

import msgspec


class Instruction(NamedTuple):
    """One instruction of a stage, with its continued lines joined."""

    keyword: str
    rest: str

    def argv(self) -> list[str]:
        """Return the argument list of an instruction in exec form."""
        return msgspec.convert(json.loads(self.rest[self.rest.index("[") :]), list[str])


class Stages:
    """All stages of a Dockerfile, by name."""

    def __init__(self, path: Path) -> None:
        self._base: dict[str, str] = {}
        self._own: dict[str, list[Instruction]] = {}
        name = ""
        for keyword, rest in _instructions(path.read_text()):
            if keyword == "FROM":
                base, _, name = rest.partition(" AS ")
                self._base[name], self._own[name] = base, []
            elif name:
                self._own[name].append(Instruction(keyword, rest))

    def names(self) -> list[str]:
        """Names in the order of the file; a build without a target builds the last one."""
        return list(self._own)

    def last(self, stage: str, keyword: str) -> Instruction:
        """Return the instruction with this keyword that applies in an image of `stage`."""
        while stage in self._own:
            for instruction in reversed(self._own[stage]):
                if instruction.keyword == keyword:
                    return instruction
            stage = self._base[stage]
        raise KeyError(keyword)

    def environment(self, stage: str) -> dict[str, str]:
        """Variables of an image of `stage`."""
        own = [i.rest for i in self._own.get(stage, []) if i.keyword == "ENV"]
        pairs = [pair.split("=", 1) for rest in own for pair in rest.split()]
        below = self.environment(self._base[stage]) if stage in self._base else {}
        return below | dict(pairs)

    def context_files(self) -> list[str]:
        """Files that the build copies out of the repository."""
        copies = [i.rest.split() for own in self._own.values() for i in own if i.keyword == "COPY"]
        return [each for parts in copies if "--from" not in parts[0] for each in parts[:-1]]

    def copied_from(self, stage: str) -> list[str]:
        """Stages from which `stage` copies files."""
        copies = [i.rest.split()[0] for i in self._own[stage] if i.keyword == "COPY"]
        return [each.removeprefix("--from=") for each in copies if each.startswith("--from=")]

    def runs(self, stage: str) -> str:
        """All commands that are run to build `stage`."""
        text = ""
        while stage in self._own:
            text += "\n".join(i.rest for i in self._own[stage] if i.keyword == "RUN")
            stage = self._base[stage]
        return text


def _instructions(text: str) -> list[Instruction]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [Instruction(*line.strip().split(maxsplit=1)) for line in whole]
