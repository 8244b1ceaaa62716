"""Limits on the length of files and functions.

There is no list of exceptions. A file that is too long is split by concept.
"""

from collections.abc import Iterable, Iterator
from statistics import quantiles

from tests.house.source import Fault, Function, Module

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_P95_LINES = 30


def file_sizes(module: Module) -> Iterator[Fault]:
    """Limit a file, which is one concept."""
    num_lines = len(module.text.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield module.fault(1, f"{num_lines} lines; at most {MAX_FILE_LINES}")


def function_sizes(module: Module) -> Iterator[Fault]:
    """Limit a function; its docstring and signature count, decorators do not."""
    for function in module.functions():
        num_lines = length(function)
        if num_lines > MAX_FUNCTION_LINES:
            what = f"{function.name} has {num_lines} lines; at most {MAX_FUNCTION_LINES}"
            yield module.fault(function, what)


def p95_function(modules: Iterable[Module]) -> float:
    """Return the length below which 95 % of all functions are."""
    lengths = [length(function) for module in modules for function in module.functions()]
    return quantiles(lengths, n=20, method="inclusive")[-1]


def length(function: Function) -> int:
    """Return the number of lines from `def` to the end of the body."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1
