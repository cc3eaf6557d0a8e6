"""What is parked, and for what it waits."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from seqdedupe.client.stored import Message


class Waiting(NamedTuple):
    """A message that is parked."""

    message: Message
    versions: Mapping[str, int]
    """By key: the version that it is."""

    missing: Mapping[str, int]
    """By key: the version that has to be applied before it, and is not; empty if its own handling has failed."""

    seconds: float
    """How long it has been parked."""

    error: str
    """Why the handler would not take it when its turn came; empty if that has not been."""

    in_cycle: bool
    """Whether it waits, over others, for itself: nothing that comes can end that."""


def in_cycles(parked: Sequence[tuple[Mapping[str, int], Mapping[str, int]]]) -> list[bool]:
    """Of each message (its versions, and those it waits for), whether it waits for itself, over others that are parked.

    Those in cycles are what is left of a strongly connected part with more than one, or with an edge to itself.
    """
    provider = {(key, version): i for i, (versions, _) in enumerate(parked) for key, version in versions.items()}
    needs = [sorted({provider[wanted] for wanted in missing.items() if wanted in provider}) for _, missing in parked]
    found = [False] * len(parked)
    for part in _connected(needs):
        if len(part) > 1 or part[0] in needs[part[0]]:
            for i in part:
                found[i] = True
    return found


def _connected(edges: Sequence[Sequence[int]]) -> list[list[int]]:
    """The strongly connected parts, after Tarjan, without recursion: chains may be long."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    on_stack: set[int] = set()
    stack: list[int] = []
    parts: list[list[int]] = []
    for root in range(len(edges)):
        if root in order:
            continue
        work = [(root, 0)]
        while work:
            node, next_edge = work.pop()
            if next_edge == 0:
                order[node] = low[node] = len(order)
                stack.append(node)
                on_stack.add(node)
            else:
                low[node] = min(low[node], low[edges[node][next_edge - 1]])
            for i in range(next_edge, len(edges[node])):
                target = edges[node][i]
                if target not in order:
                    work += [(node, i + 1), (target, 0)]
                    break
                if target in on_stack:
                    low[node] = min(low[node], order[target])
            else:
                if low[node] == order[node]:
                    part: list[int] = []
                    while not part or part[-1] != node:
                        part.append(stack.pop())
                        on_stack.discard(part[-1])
                    parts.append(part)
    return parts
