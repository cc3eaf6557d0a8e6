"""What a case is: a seed and a list of steps.

Each step is an action of `Case` and a number from which it draws all it needs, so that steps can be omitted and the
others do about the same.
"""

from collections.abc import Iterable, Mapping
from random import Random

Step = tuple[str, int]

ACTIONS = {
    "send": 34,
    "deliver": 30,
    "answer": 20,
    "settle": 13,
    "job": 10,
    "burst": 3,
    "store": 5,
    "report": 5,
    "refuse": 2,
    "unknown": 4,
    "fence": 2,
    "two_failures": 2,
    "snapshot_fails": 2,
    "refuse_opens": 1,
    "hold_opening": 2,
    "time": 4,
    "snapshot": 5,
    "fail_sync": 1,
    "break_stream": 2,
    "open": 24,
    "timeout": 4,
    "send_old": 3,
    "rival": 1,
    "policy": 1,
    "reset": 5,
    "idle": 3,
    "crash": 2,
    "drain": 1,
}
"""How often each comes. A case leaves some out and has others twice as often."""

NEVER_LEFT_OUT = ("send", "deliver", "answer", "settle", "job", "open")
RESETS = 0.4
"""The share of cases with any: in the others messages are never taken again."""

POLICY_SWITCHES = 0.2
"""The share of cases with any: what is doubled in them may be, so they prove less."""


def drawn(
    seed: int,
    actions: Mapping[str, int],
    never_left_out: Iterable[str],
    rare: Mapping[str, float],
    count: tuple[int, int],
) -> list[Step]:
    """Between this many steps and this many, of actions with weights. A case leaves some out and has others twice as
    often; of the `rare` ones only this share of the cases has any."""
    random = Random(seed)
    weights = {action: weight * random.choice((0, 1, 1, 2)) for action, weight in actions.items()}
    for action in never_left_out:
        weights[action] = actions[action]
    for action, share in rare.items():
        if random.random() >= share:
            weights[action] = 0
    names = random.choices(list(weights), list(weights.values()), k=random.randint(*count))
    return [(name, random.getrandbits(48)) for name in names]


def steps_of(seed: int) -> list[Step]:
    """The steps of a case."""
    return drawn(seed, ACTIONS, NEVER_LEFT_OUT, {"policy": POLICY_SWITCHES, "reset": RESETS}, (30, 150))
