"""The models of the protocol: no promise breaks at small bounds, and five rules cannot be omitted.

`make model` explores more, and compares what it finds with the page.
"""

import pytest

from model.check import BUGS, PAGE, SCENES, Result, run, with_part
from tests import tiers

SMALL = {
    "pipelining": {"LOG": 7},
    "two owners": {"LOG": 6},
    "two sessions": {"LOG": 6},
    "readers": {"LOG": 6},
    "restored log": {"CRASHES": 0},
    "window": {"LOG": 4},
}
"""Bounds below those of `make model`, which explores each scene."""


def explored(scene_name: str, bug: str = "") -> Result:
    tiers.SPIN.check()
    [scene] = [scene for scene in SCENES if scene.name == scene_name]
    return run(scene, {**scene.small, **SMALL.get(scene_name, {})}, bug)


@pytest.mark.parametrize("scene", sorted(SMALL))
def test_every_promise_holds(scene: str) -> None:
    result = explored(scene)
    assert (result.broken, result.trace) == ("", ())
    assert result.states > 10_000


@pytest.mark.parametrize(
    ("scene", "bug", "promise", "last"),
    [
        ("pipelining", "NO_LINK", "order", "A.land(MESSAGE,2)"),
        ("two owners", "CONFIRMS_WITHOUT_READING_A_GAP", "receipt", "A.confirm(MESSAGE,1)"),
        ("readers", "ANY_SIDECAR_SAYS_WHERE_THE_TOPIC_ENDS", "reader", "B.afterEnd(1)"),
        ("restored log", "RESUMES_BELOW_ITS_RECEIPTS", "loss", "A.resumed(s1,0)"),
        ("window", "ID_IN_FLIGHT_COUNTS_AS_NEW", "at most once", "land(1,index1)"),
    ],
)
def test_control_without_a_rule_a_promise_breaks(scene: str, bug: str, promise: str, last: str) -> None:
    result = explored(scene, bug)
    assert result.broken.partition(":")[0] == promise
    assert result.trace[-1] == last


def test_every_bug_is_in_a_model() -> None:
    """Otherwise a run without the rule would be a run with it."""
    models = "".join(file.read_text() for file in (PAGE.parents[2] / "model").glob("*.pml"))
    assert [bug.name for bug in BUGS if f"BUG_{bug.name}\n" not in models and f"BUG_{bug.name})" not in models] == []
    assert len({bug.name for bug in BUGS}) == len(BUGS)


def test_a_part_of_the_page_is_replaced() -> None:
    page = "a\n<!-- x: written by model/check.py -->\n\nold\n\n<!-- end -->\nb\n<!-- end -->\n"
    assert with_part(page, "x", "new") == page.replace("old", "new")
    with pytest.raises(ValueError, match="no part 'y'"):
        with_part(page, "y", "new")
