"""A radix tree that finds the longest stored prefix of a text.

A search reads each byte of its text once. A sorted list was rejected: with texts that branch off
one after the other, it reads the whole text again for each of them.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from rekindle.tokens import common_bytes

T = TypeVar("T")


class _Node(Generic[T]):
    """A stored text, or a common prefix of two stored texts."""

    __slots__ = ("children", "edge", "value")

    def __init__(self, edge: bytes, value: T | None = None) -> None:
        self.edge = edge  # appended to the text of the parent
        self.value = value
        self.children: dict[int, _Node[T]] = {}  # by the first byte of their edges

    def adopt(self, child: _Node[T]) -> None:
        self.children[child.edge[0]] = child

    def next(self, text: bytes, at: int) -> _Node[T] | None:
        """The child whose edge begins with the byte at this position."""
        return self.children.get(text[at]) if at < len(text) else None


class TextIndex(Generic[T]):
    """For equal texts the later value wins."""

    def __init__(self) -> None:
        self._root: _Node[T] = _Node(b"")
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, text: bytes, value: T) -> None:
        path, at = self._walk(text)
        node = path[-1]
        if child := node.next(text, at):
            node = _split(node, child, common_bytes(child.edge, text[at : at + len(child.edge)]))
            at += len(node.edge)
        if at < len(text):
            node.adopt(_Node(text[at:], value))
            self._count += 1
        else:
            self._count += node.value is None
            node.value = value

    def drop(self, text: bytes, value: T) -> None:
        """Remove the text, unless it has another value by now."""
        path, at = self._walk(text)
        node = path[-1]
        if at < len(text) or node.value is not value:
            return
        node.value = None
        self._count -= 1
        if not node.children and len(path) > 1:
            path.pop()
            del path[-1].children[node.edge[0]]
        _merge(path)

    def longest(self, text: bytes) -> T | None:
        """The value of the longest stored text that is a prefix of `text`."""
        path, _ = self._walk(text)
        return next((node.value for node in reversed(path) if node.value is not None), None)

    def nearest(self, text: bytes) -> T | None:
        """The value of a stored text that has the longest common prefix with `text`."""
        path, at = self._walk(text)
        node = path[-1].next(text, at) or path[-1]
        while node.value is None and node.children:
            node = next(iter(node.children.values()))
        return node.value

    def _walk(self, text: bytes) -> tuple[list[_Node[T]], int]:
        """The nodes whose texts are prefixes of `text`, from the root on, and the end of the
        last."""
        node, at = self._root, 0
        path = [node]
        while (child := node.next(text, at)) and _has_edge(text, at, child.edge):
            node, at = child, at + len(child.edge)
            path.append(node)
        return path, at


def _has_edge(text: bytes, at: int, edge: bytes) -> bool:
    return text.startswith(edge, at)


def _split(node: _Node[T], child: _Node[T], shared: int) -> _Node[T]:
    """Insert a node between these two, after `shared` bytes of the child's edge."""
    between: _Node[T] = _Node(child.edge[:shared])
    node.adopt(between)
    child.edge = child.edge[shared:]
    between.adopt(child)
    return between


def _merge(path: list[_Node[T]]) -> None:
    """Remove the last node if it is neither a text nor a branch."""
    node = path[-1]
    if len(path) == 1 or node.value is not None or len(node.children) != 1:
        return
    [child] = node.children.values()
    child.edge = node.edge + child.edge
    path[-2].adopt(child)
