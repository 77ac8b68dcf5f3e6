"""Read a script's calls with `ast`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsdoctor.scripts.facts import Call, ScriptFacts

_LONGEST = 100


def read(path: Path) -> ScriptFacts:
    """The calls of a file. A file that is not Python gives facts with a `problem`, nothing raises but OSError."""
    return parse(path.read_bytes().decode("utf-8", errors="replace"), str(path))


def parse(source: str, path: str = "<script>") -> ScriptFacts:
    """The calls of a text."""
    try:
        tree = ast.parse(source)
        calls = tuple(_calls(tree, source.split("\n")))
    except (SyntaxError, ValueError, RecursionError) as error:
        return ScriptFacts(path=path, problem=" ".join(f"{type(error).__name__}: {error}".split()))
    return ScriptFacts(path=path, calls=tuple(sorted(calls, key=lambda call: (call.line, call.column))))


def _calls(tree: ast.Module, lines: list[str]) -> Iterator[Call]:
    """Walk without recursion, so that a long chain of calls is no problem; the order is the caller's to make."""
    pending: list[tuple[ast.AST, str, tuple[str, ...]]] = [(tree, "", ())]
    imported = _imported(tree)
    targets: dict[ast.AST, tuple[str, ...]] = {}
    while pending:
        node, scope, contexts = pending.pop()
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets[node.value if node.value is not None else node] = _bound(node)
        if isinstance(node, ast.Call):
            call = _call(node, scope, contexts, targets.get(node, ()), lines)
            yield replace(call, owner=imported.get(call.name, "")) if not call.owner else call
        inner_scope = scope
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner_scope = f"{scope}.{node.name}".lstrip(".")
        inner_contexts = contexts
        if isinstance(node, (ast.With, ast.AsyncWith)):
            inner_contexts = (*contexts, *(_dotted(item.context_expr) for item in node.items))
        pending.extend((child, inner_scope, inner_contexts) for child in ast.iter_child_nodes(node))


def _imported(tree: ast.Module) -> dict[str, str]:
    """The modules of names that the script imports out of them, whatever the place of the import."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module)
    return {name.asname or name.name: str(node.module) for node in nodes for name in node.names}


def _call(node: ast.Call, scope: str, contexts: tuple[str, ...], targets: tuple[str, ...], lines: list[str]) -> Call:
    owner, _, name = _dotted(node.func).rpartition(".")
    keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
    return Call(
        name=name,
        owner=owner,
        line=node.lineno,
        column=node.col_offset + 1,
        text=lines[node.lineno - 1].strip()[:_LONGEST],
        scope=scope,
        literals={key: value for key, node in keywords.items() for value in _literal(node)},
        given={key: _dotted(value) for key, value in keywords.items()},
        arguments=tuple(_dotted(argument) for argument in node.args),
        first=_text(node.args[0]) if node.args else None,
        targets=targets,
        contexts=contexts,
        open=len(keywords) < len(node.keywords) or any(isinstance(argument, ast.Starred) for argument in node.args),
    )


def _dotted(node: ast.AST) -> str:
    """`a.b.c` for names and attributes, through calls and indices; "" for anything else."""
    parts: list[str] = []
    while True:
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        elif isinstance(node, (ast.Call, ast.Subscript)):
            node = node.func if isinstance(node, ast.Call) else node.value
        else:
            break
    return ".".join([*([node.id] if isinstance(node, ast.Name) else []), *reversed(parts)])


def _literal(node: ast.expr) -> Iterator[Any]:
    """The value of a constant expression, nothing for others."""
    try:
        yield ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _bound(node: ast.Assign | ast.AnnAssign) -> tuple[str, ...]:
    """The names that an assignment binds; "" for one that is no name, so that the places of a tuple are kept."""
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    elements = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
    return tuple(_dotted(element) for element in elements)
