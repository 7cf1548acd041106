"""More classes than a model knows, as a tree of choices between few groups of them."""

from collections.abc import Sequence
from itertools import pairwise

Node = list[list[int]]
"""The classes of each of its children, which are in no other child."""


def class_tree(classes: Sequence[int], max_classes: int) -> list[Node]:
    """The nodes, of 2 to max_classes children; the path to a class leads through all nodes that have it.

    All paths are as short as that of most classes can be, and the children of a node differ by one class at most.
    Neighbours stay together, so that an order of the classes serves. With at most max_classes there is one node.

    classes: at least 2. max_classes: at least 2.
    """
    size = 1
    while size * max_classes < len(classes):
        size *= max_classes
    children = _split(classes, -(-len(classes) // size))
    below = [node for child in children if len(child) > 1 for node in class_tree(child, max_classes)]
    return [children, *below]


def _split(classes: Sequence[int], num_parts: int) -> Node:
    bounds = [len(classes) * i // num_parts for i in range(num_parts + 1)]
    return [list(classes[first:last]) for first, last in pairwise(bounds)]
