"""The loops around a line of Python source: they tell two ranks in one round from one that is past the loop."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from functools import lru_cache

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


def loops_around(file: str, line: int) -> tuple[int, ...]:
    """First lines of the loops whose body holds this line, within its function, innermost first.

    Empty where there is none, or where the source cannot be read.
    """
    tree = _tree(file)
    return tuple(reversed(list(_holding(tree, line)))) if tree is not None and line > 0 else ()


@lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _holding(tree: ast.AST, line: int) -> Iterator[int]:
    """The loops on the way down to the line, outermost first; a function on the way begins anew."""
    loops: list[int] = []
    node: ast.AST | None = tree
    while node is not None:
        if isinstance(node, _FUNCTIONS):
            loops.clear()
        elif isinstance(node, _LOOPS) and any(_covers(part, line) for part in node.body):
            loops.append(node.lineno)
        node = next((child for child in ast.iter_child_nodes(node) if _covers(child, line)), None)
    yield from loops


def _covers(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    return first is not None and last is not None and first <= line <= last
