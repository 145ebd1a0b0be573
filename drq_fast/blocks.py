"""Sums over blocks of rows in an order that does not depend on who computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

_Sum = TypeVar("_Sum", bound="Addable")


class Addable(Protocol):
    """What can be added up, such as a tensor."""

    def __add__(self: _Sum, other: _Sum, /) -> _Sum: ...


# Sums of the nodes of a binary tree whose leaves are blocks: node (h, i) has the blocks from i * 2**h on, 2**h of them.
Nodes = dict[tuple[int, int], Any]


class Calls(Protocol):
    """Blocks of rows, here or elsewhere, whose methods are called by name."""

    def each(self, method: str, *arguments: Any) -> list[Any]:
        """What a method of each block returns, in the order of the blocks."""

    def total(self, method: str, *arguments: Any) -> Any:
        """The sum of what a method of each block returns."""


class Blocks:
    """Consecutive blocks in this process; first: the number of the first one among all blocks."""

    def __init__(self, blocks: Sequence[Any], first: int = 0) -> None:
        self.blocks, self.first = blocks, first

    def each(self, method: str, *arguments: Any) -> list[Any]:
        """See Calls."""
        return [getattr(block, method)(*arguments) for block in self.blocks]

    def total(self, method: str, *arguments: Any) -> Any:
        """See Calls; for blocks that are all there are."""
        return sum_of(self.nodes(method, *arguments))

    def nodes(self, method: str, *arguments: Any) -> Nodes:
        """The sums of the largest subtrees that these blocks fill."""
        nodes: Nodes = {}
        for number, block in enumerate(self.blocks, self.first):
            height, place, value = 0, number, getattr(block, method)(*arguments)
            while place % 2 and (height, place - 1) in nodes:
                value = nodes.pop((height, place - 1)) + value
                height, place = height + 1, place // 2
            nodes[height, place] = value
        return nodes


def sum_of(nodes: Nodes) -> Any:
    """The sum of all blocks, given subtrees that have each block once: the same bits whatever the subtrees are."""
    root = max((place << height).bit_length() for height, place in nodes) if nodes else 0
    root = max(root, *(height for height, _ in nodes))

    def of(height: int, place: int) -> Any:
        if (height, place) in nodes or height == 0:
            return nodes.get((height, place))
        left, right = of(height - 1, 2 * place), of(height - 1, 2 * place + 1)
        return left if right is None else left + right

    return of(root, 0)
