"""Which modules the always-on watch looks at: the blocks of a model and what stands beside them, not all their parts.

From the root down, a module that only strings blocks together is opened (it holds a ModuleList, or is a Sequential of
larger parts); what is left are decoder layers, embeddings, final norms and heads. Runs in rank processes only.
"""

from __future__ import annotations

from torch import nn

from dsdoctor.numerics.engines import takes_hooks

_LIMIT = 512
"""Modules that are watched at most; of more, every second, third, … is left."""


def blocks(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module of each block, in the order of `named_modules`, each module once. The root is not among them."""
    found: dict[int, tuple[str, nn.Module]] = {}
    _collect(root, "", found)
    chosen = list(found.values())
    return chosen[:: 1 + len(chosen) // _LIMIT]


def _collect(module: nn.Module, name: str, found: dict[int, tuple[str, nn.Module]]) -> None:
    for label, child in module.named_children():
        path = f"{name}.{label}" if name else label
        if _strings_blocks_together(child):
            _collect(child, path, found)
        elif id(child) not in found and takes_hooks(child):
            found[id(child)] = (path, child)


def _strings_blocks_together(module: nn.Module) -> bool:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return True
    if isinstance(module, nn.Sequential):
        return any(True for part in module for _ in part.children())
    return any(isinstance(part, (nn.ModuleList, nn.ModuleDict)) for part in module.modules())
