"""The actions that a case is made of, each drawing all it needs from `random`."""

import asyncio

from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.topic.base import State
from seqdedupe.topic.policy import Policy
from tests.property.cases import Step, drawn
from tests.property.disk import CrashableStore
from tests.property.windows.world import MAX_ROWS, SENT, Place, WindowWorld, some_policy

ACTIONS = {
    "send": 60,
    "settle": 30,
    "job": 40,
    "store": 4,
    "report": 4,
    "refuse": 2,
    "unknown": 4,
    "fence": 2,
    "refuse_opens": 1,
    "hold_opening": 1,
    "clock": 3,
    "time": 4,
    "snapshot": 4,
    "fail_store": 5,
    "fail_sync": 4,
    "heal": 8,
    "cancel": 6,
    "cancel_moving": 2,
    "policy": 1,
    "limits": 1,
    "crash": 4,
    "drain": 1,
    "reopen": 1,
    "rebuild": 1,
    "make_anew": 1,
}
"""How often each comes. A case leaves some out and has others twice as often."""

NEVER_LEFT_OUT = ("send", "settle", "job", "heal")
POLICY_SWITCHES = 0.3
"""The share of cases where deduplication is switched off and on: they prove less."""

LIMIT_CHANGES = 0.3


def steps_of(seed: int) -> list[Step]:
    """The steps of a case."""
    return drawn(seed, ACTIONS, NEVER_LEFT_OUT, {"policy": POLICY_SWITCHES, "limits": LIMIT_CHANGES}, (40, 180))


class WindowCase(WindowWorld):
    """A world in which things happen."""

    def run(self, steps: list[Step]) -> None:
        try:
            self.start_process()
            for number, (action, seed) in enumerate(steps):
                self.say(lambda: f"{number} {action}")  # noqa: B023 (called at once)
                self.random.seed(seed)
                getattr(self, f"do_{action}")(self.random.choice(self.places))
                # Sometimes the process does not get far before the next thing happens.
                self.loop.run(None if self.random.random() < 0.6 else self.random.randint(0, 4))
                self.check()
                for place in self.places:
                    self.check_left(place)
            self.finish()
        finally:
            self.loop.end()
            asyncio._set_running_loop(None)

    # -- calls ---------------------------------------------------------------------------------------------------

    def do_send(self, place: Place) -> None:
        if place.calls and self.random.random() < 0.3:
            ids = self.random.choice(place.calls).ids
        else:
            first = self.random.randrange(len(SENT))
            near = [SENT[(first + k) % len(SENT)] for k in range(12)]
            ids = self.random.choices(near, k=self.random.randint(1, MAX_ROWS))
        self.send(place, ids, waits=self.random.choice((0, 0, 1, 5, -1, -1)))

    def do_cancel(self, place: Place) -> None:
        """A client goes, wherever its call is."""
        if place.sending:
            chosen = self.random.choice(sorted(place.sending, key=lambda task: int(task.get_name().split("-")[-1])))
            chosen.cancel()

    def do_cancel_moving(self, place: Place) -> None:
        """As another topic does that is closed."""
        if self.memory._moving is not None:
            self.memory._moving.cancel()

    # -- logs ----------------------------------------------------------------------------------------------------

    def some_in_flight(self, place: Place) -> int:
        return self.random.randint(0, place.log.in_flight)

    def do_settle(self, place: Place) -> None:
        place.log.settle(self.random.randint(1, max(place.log.in_flight, 1)))

    def do_store(self, place: Place) -> None:
        place.log.store(self.some_in_flight(place))

    def do_report(self, place: Place) -> None:
        place.log.report()

    def do_refuse(self, place: Place) -> None:
        if not place.log.failed:
            place.log.refuse(report=self.random.random() < 0.6)

    def do_unknown(self, place: Place) -> None:
        if not place.log.failed:
            place.log.unknown(self.some_in_flight(place), report=self.random.random() < 0.6)

    def do_fence(self, place: Place) -> None:
        term = max(1, place.topic.term + self.random.randint(-1, 3))
        place.log.fence(term, self.some_in_flight(place), report=self.random.random() < 0.6)

    def do_refuse_opens(self, place: Place) -> None:
        place.log.refuse_opens(self.random.randint(1, 2), marked=self.random.random() < 0.5)

    def do_hold_opening(self, place: Place) -> None:
        if place.log.opening_allowed.is_set():
            place.log.opening_allowed.clear()
        else:
            place.log.opening_allowed.set()

    # -- time and threads ----------------------------------------------------------------------------------------

    def do_clock(self, place: Place) -> None:
        """Messages grow old."""
        self.now_ms += self.random.choice((1, 20_000, 20_000, 70_000))

    def do_time(self, place: Place) -> None:
        self.loop.advance(self.random.choice((0.1, 3)))

    def do_job(self, place: Place) -> None:
        for _ in range(self.random.choice((1, 1, 5))):
            if self.loop.jobs:
                self.run_some_job()
                self.loop.run(self.random.choice((None, None, 1)))

    # -- the store -----------------------------------------------------------------------------------------------

    def do_snapshot(self, place: Place) -> None:
        self.loop.create_task(place.topic.keeper.snapshot_in_background())

    def do_fail_store(self, place: Place) -> None:
        self.store.fail_after(self.random.randint(0, 6), self.random.choice((0, 0, 1, 4)))
        self.some_jobs()

    def do_fail_sync(self, place: Place) -> None:
        self.store.fail_next_sync(self.random.choice((0, 0, 1, 4)))

    def do_heal(self, place: Place) -> None:
        self.store.calls_left = None

    # -- operators -----------------------------------------------------------------------------------------------

    def do_policy(self, place: Place) -> None:
        if place.topic.state is State.SERVING:
            now = Policy(deduplication_enabled=not place.topic.newest_policy.deduplication_enabled)
            self.loop.create_task(self.set_policy(place.topic, place.topic.newest_policy.with_values_of(now)))

    def do_limits(self, place: Place) -> None:
        if place.topic.state is State.SERVING:
            limits = place.topic.newest_policy.with_values_of(some_policy(self.random))
            self.loop.create_task(self.set_policy(place.topic, limits))

    def close(self, place: Place, *, for_good: bool = False) -> None:
        topic = place.topic
        ending = self.loop.create_task(topic.delete() if for_good else topic.close("it is opened again"))
        place.log.opening_allowed.set()
        self.run_until(ending.done)
        place.log = place.log.crash(self.some_in_flight(place))
        self.forget_calls(place)

    def do_reopen(self, place: Place) -> None:
        """As where a topic was damaged, or a snapshot is imported; the other one goes on."""
        self.do_heal(place)
        self.close(place)
        self.open_topic(place)

    def do_rebuild(self, place: Place) -> None:
        """Its records are made again from its log."""
        self.do_heal(place)
        self.close(place)
        removing = self.loop.create_task(self.store.flush(Snapshots(self.store, place.model.incarnation).remove()))
        self.run_until(removing.done)
        place.model.store_lost()
        self.open_topic(place)

    def do_make_anew(self, place: Place) -> None:
        """It is deleted, and another one of its name is made."""
        self.do_heal(place)
        self.close(place, for_good=True)
        before = place.model.incarnation
        removing = self.loop.create_task(Store.remove_topic(self.store, before))
        self.run_until(removing.done)
        if left := self.run_numbers(place):
            place.model.wrong(f"it is deleted, and has the runs {left}")
        other = self.new_place(place.model.name)
        self.store.watch_instead(before, other.model.incarnation)
        self.places[self.places.index(place)] = other
        self.open_topic(other)

    # -- the process ---------------------------------------------------------------------------------------------

    def some_jobs(self) -> None:
        """For a fault in the midst of a run or a snapshot as often as at its end."""
        for _ in range(self.random.choice((0, 0, 3, 6, 12, 24))):
            if self.loop.jobs:
                self.run_some_job()
            self.loop.run(self.random.choice((None, None, 3)))

    def do_crash(self, place: Place) -> None:
        """kill -9, or a power cut, which also takes what the store had not synced, or the store is lost as a whole."""
        self.some_jobs()
        self.end_process(self.some_in_flight)
        kind = self.random.random()
        if kind < 0.15:
            self.say(lambda: "    the store is lost")
            self.store.lose()
            for one in self.places:
                one.model.store_lost()
        elif kind < 0.6:
            self.store.cut_power(self.random.randint(0, 3))
        self.store.restart()
        self.start_process()

    def do_drain(self, place: Place) -> None:
        """An orderly end, and a new process."""
        self.do_heal(place)
        for one in self.places:
            one.log.opening_allowed.set()
        drained = [self.loop.create_task(one.topic.drain()) for one in self.places]
        for _ in range(20):
            if all(task.done() for task in drained):
                break
            self.calm_down()
        self.end_process(lambda place: 0)
        self.store.restart()
        self.start_process()


def run_case(store: CrashableStore, seed: int, steps: list[Step], trace: list[str] | None = None) -> None:
    """Runs one case. Raises `Violation`."""
    WindowCase(store, seed, trace).run(steps)
