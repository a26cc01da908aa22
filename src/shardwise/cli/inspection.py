"""``shardwise inspect``: a checkpoint as a tree of names with shapes, dtypes and bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text
from rich.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.checkpoint.description import Described, Description


def inspection_tree(title: str, description: Description) -> Tree:
    """Return what is printed of a checkpoint."""
    tree = Tree(Text(title, "bold"))
    writer = description.world_size
    tree.add(f"step {description.step}" if description.step is not None else "no step was noted")
    tree.add(f"written by {writer} rank(s)" if writer is not None else "not written by shardwise")
    if not description.is_listed:
        tree.add(Text("not verified: it has no manifest", "yellow"))
    elif description.damage is None:
        tree.add(Text("verified: every file matches its hash", "green"))
    else:
        tree.add(Text(f"DAMAGED: {description.damage}", "bold red"))
    for what, tensors in (("model", description.model), ("optimizer", description.optimizer)):
        if tensors:
            label = f"{what}: {_sum_of(tensors)} in {len(tensors)} tensors"
            _grow(tree.add(label), tensors)
    return tree


def _grow(tree: Tree, tensors: Sequence[Described]) -> None:
    """Add tensors under the parts of their names."""
    branches: dict[tuple[str, ...], Tree] = {(): tree}
    sizes: dict[tuple[str, ...], list[Described]] = {}
    for tensor in tensors:
        parts = tuple(tensor.name.split("."))
        for length in range(1, len(parts)):
            sizes.setdefault(parts[:length], []).append(tensor)
    for tensor in tensors:
        *path, leaf = tensor.name.split(".")
        parent: tuple[str, ...] = ()
        for part in path:
            here = (*parent, part)
            if here not in branches:
                branches[here] = branches[parent].add(f"{part}  {_sum_of(sizes[here])}")
            parent = here
        branches[parent].add(f"{leaf}  {_say(tensor)}")


def _say(tensor: Described) -> str:
    """Return one tensor in a line."""
    if tensor.tied_to is not None:
        return f"tied to {tensor.tied_to}"
    shape = " x ".join(str(size) for size in tensor.shape) or "scalar"
    return f"{shape}  {str(tensor.dtype).removeprefix('torch.')}  {_bytes(tensor.num_bytes)}"


def _sum_of(tensors: Sequence[Described]) -> str:
    """Return the bytes of several tensors, tied ones once."""
    return _bytes(sum(one.num_bytes for one in tensors if one.tied_to is None))


def _bytes(num_bytes: int) -> str:
    """Return a size for people."""
    size: float = num_bytes
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def as_json(description: Description) -> dict[str, Any]:
    """Return the same for programs."""
    return {
        "world_size": description.world_size,
        "step": description.step,
        "is_verified": description.is_listed and description.damage is None,
        "damage": description.damage,
        "tensors": {
            part: [
                {
                    "name": one.name,
                    "shape": list(one.shape),
                    "dtype": str(one.dtype).removeprefix("torch."),
                    "num_bytes": one.num_bytes,
                    "tied_to": one.tied_to,
                }
                for one in tensors
            ]
            for part, tensors in (
                ("model", description.model),
                ("optimizer", description.optimizer),
            )
        },
    }
