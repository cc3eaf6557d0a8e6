"""The actions that a case is made of, each drawing all it needs from `random`."""

import asyncio

from seqdedupe.topic.policy import Policy
from tests.property.cases import Step
from tests.property.client import MAX_ROWS, MAX_UNACKED, State
from tests.property.disk import Violation
from tests.property.wires import Stream
from tests.property.world import LAST_ROUNDS, World


class Case(World):
    """A world in which things happen."""

    def run(self, steps: list[Step]) -> None:
        try:
            self.start_process()
            if self.begins_calmly:
                for _ in range(3):
                    self.round_without_faults()
            for number, (action, seed) in enumerate(steps):
                self.say(lambda: f"{number} {action}")  # noqa: B023 (called at once)
                self.random.seed(seed)
                getattr(self, f"do_{action}")()
                # Sometimes the process does not get far before the next thing happens.
                self.loop.run(None if self.random.random() < 0.75 else self.random.randint(0, 3))
                self.judge.check(self.loop.failures)
            self.finish()
        finally:
            self.loop.end()
            asyncio._set_running_loop(None)

    def some_stream(self) -> Stream:
        """A stream of a client that can send, if there is one."""
        able = {client for (client, _), session in self.sessions.items() if session.state is State.OPEN}
        return self.random.choice([stream for stream in self.streams if stream.client in able] or self.streams)

    def some_in_flight(self) -> int:
        return self.random.randint(0, self.log.in_flight)

    # -- clients ----------------------------------------------------------------------------------------------------

    def do_send(self) -> None:
        stream = self.some_stream()
        is_unary = self.random.random() < 0.25
        taken = {}
        for session in self.mine(stream.client):
            if session.state is State.OPEN and self.random.random() < 0.7:
                may_be_new = len(session.unacked) < MAX_UNACKED and not session.must_resend
                was_resend = session.must_resend
                ids = session.take(self.random, self.random.randint(1, MAX_ROWS), may_be_new or not session.unacked)
                if ids:
                    taken[session] = ids
                if was_resend and session.sent and self.random.random() < 0.3:
                    # What was sent after it may still arrive: it is not sent again for now.
                    session.cursor = max(session.cursor, session.sent[-1] + 1)
        if taken:
            self.post(stream, taken, is_unary=is_unary)
        elif self.open_answers or self.opens or not any(s.request for s in self.sessions.values()):
            self.do_open()

    def do_send_old(self) -> None:
        stream = self.some_stream()
        taken = {}
        for session in self.mine(stream.client):
            if session.state is State.OPEN and session.sent:
                taken[session] = session.take_old(self.random, self.random.randint(1, MAX_ROWS))
        if taken:
            self.post(stream, taken, is_unary=self.random.random() < 0.3)

    def do_timeout(self) -> None:
        for session in self.sessions.values():
            if self.random.random() < 0.5:
                session.must_resend = True

    def do_open(self) -> None:
        """What is next of an Open: a client hears the answer, or the topic gets it, or a client sends one."""
        if self.open_answers and self.random.random() < 0.9:
            self.answer_open(is_lost=self.random.random() < 0.1)
        elif self.opens and self.random.random() < 0.9:
            self.deliver_open()
        else:
            self.ask_open(self.random.randrange(2))

    def do_rival(self) -> None:
        """The other client wants a name too."""
        client, name = self.random.choice(list(self.sessions))
        if (1 - client, name) not in self.sessions:
            self.new_session(1 - client, name)

    def do_break_stream(self) -> None:
        self.break_stream(self.random.choice(self.streams))

    # -- the wires --------------------------------------------------------------------------------------------------

    def do_deliver(self) -> None:
        ways = [stream for stream in self.streams if stream.frames]
        if self.loose and (not ways or self.random.random() < 0.5):
            frame, stream = self.loose.pop(self.random.randrange(len(self.loose)))
            self.admit(frame, stream)
        elif ways:
            stream = self.random.choice(ways)
            self.admit(stream.frames.popleft(), stream)

    def do_burst(self) -> None:
        self.deliver_all()

    def do_answer(self) -> None:
        ways = [stream for stream in self.streams if stream.answers]
        if self.unary_answers and (not ways or self.random.random() < 0.5):
            frame, answer = self.unary_answers.pop(self.random.randrange(len(self.unary_answers)))
            if self.random.random() < 0.8:
                frame.answered(answer)
        elif ways:
            frame, answer = self.random.choice(ways).answers.popleft()
            frame.answered(answer)

    # -- the log ----------------------------------------------------------------------------------------------------

    def do_settle(self) -> None:
        self.log.settle(self.random.randint(1, max(self.log.in_flight, 1)))

    def do_store(self) -> None:
        self.log.store(self.some_in_flight())

    def do_report(self) -> None:
        self.log.report()

    def do_refuse(self) -> None:
        if not self.log.failed:
            self.log.refuse(report=self.random.random() < 0.6)

    def do_unknown(self) -> None:
        if not self.log.failed:
            self.log.unknown(self.some_in_flight(), report=self.random.random() < 0.6)

    def do_fence(self) -> None:
        term = max(1, self.topic.term + self.random.randint(-1, 3))
        self.log.fence(term, self.some_in_flight(), report=self.random.random() < 0.6)

    def do_two_failures(self) -> None:
        """The log fails again while the topic is getting over a failure, and frames come all the time."""
        for _ in range(3):
            self.do_send()
        self.do_unknown()
        self.log.report()
        self.loop.run(self.random.randint(0, 8))
        self.do_fence()
        self.log.report()
        for _ in range(12):
            self.loop.run(self.random.randint(0, 2))
            self.do_deliver()
            if self.random.random() < 0.5:
                self.log.settle(self.some_in_flight())

    def do_refuse_opens(self) -> None:
        self.log.refuse_opens(self.random.randint(1, 2), marked=self.random.random() < 0.5)

    def do_hold_opening(self) -> None:
        if self.log.opening_allowed.is_set():
            self.log.opening_allowed.clear()
        else:
            self.log.opening_allowed.set()

    def do_time(self) -> None:
        self.loop.advance(self.random.choice((0.1, 3)))

    # -- the store --------------------------------------------------------------------------------------------------

    def do_snapshot(self) -> None:
        self.loop.create_task(self.topic.keeper.snapshot_in_background())

    def do_job(self) -> None:
        for _ in range(self.random.choice((1, 1, 5))):
            if self.loop.jobs:
                self.loop.run_job()
                self.loop.run()

    def do_fail_sync(self) -> None:
        self.store.fail_next_sync(self.random.randint(0, 3))

    def do_snapshot_fails(self) -> None:
        """A snapshot begins while an Open waits for what is in flight, and fails."""
        self.do_send()
        self.deliver_all()
        for _ in range(4):
            self.do_open()
        self.loop.run()
        self.do_snapshot()
        self.loop.run(self.random.randint(2, 6))
        self.store.fail_next_sync(self.random.randint(0, 1))
        self.log.settle()
        self.loop.run()
        self.do_job()
        if self.random.random() < 0.5:
            self.do_crash()

    # -- the process ------------------------------------------------------------------------------------------------

    def do_policy(self) -> None:
        self.loop.create_task(self.set_policy(Policy(not self.topic.applied.deduplication_enabled)))

    def do_reset(self) -> None:
        """An operator sets a producer back, now and then while it sends and retention goes on."""
        name = self.random.choice([name for _, name in self.sessions])
        if self.random.random() < 0.5:
            self.do_send()
            self.deliver_all()
        self.loop.create_task(self.reset(name, self.random.randint(-1, self.judge.storage.promise(name).highest)))
        if self.random.random() < 0.5:
            self.do_snapshot()
            self.do_job()

    def do_idle(self) -> None:
        """Nobody uses what no stream has, for about as long as it takes to be forgotten."""
        for stream in list(self.streams):
            if self.random.random() < 0.6:
                self.break_stream(stream)
        # Nobody waits for an answer of Open for as long.
        for session in self.sessions.values():
            session.request = None
        self.log.settle()
        self.loop.run()
        for _ in range(self.random.randint(2, 6)):
            self.loop.advance(20)
            # What is done about it takes its time, in which anything may come.
            self.loop.run(self.random.choice((None, 1, 4)))
            if self.random.random() < 0.2:
                self.do_deliver()
                self.do_open()
            if self.random.random() < 0.6:
                self.log.settle()
                self.loop.run(self.random.choice((None, 2)))
        if self.random.random() < 0.5:
            self.do_snapshot()
            self.do_job()

    def do_crash(self) -> None:
        """kill -9, or a power cut, which also takes what the store had not synced, or the store is lost as a whole."""
        self.end_process(self.some_in_flight())
        kind = self.random.random()
        if kind < 0.2:
            self.say(lambda: "    the store is lost")
            self.store.lose()
        elif kind < 0.6:
            self.store.cut_power(self.random.randint(0, 3))
        self.store.restart()
        self.start_process()

    def do_drain(self) -> None:
        """An orderly end, and a new process."""
        self.log.opening_allowed.set()
        drained = self.loop.create_task(self.topic.drain())
        for _ in range(LAST_ROUNDS):
            if drained.done():
                break
            self.calm_down()
        else:
            raise Violation(f"draining does not end: {self.topic.why}")
        self.end_process(0)
        self.store.restart()
        self.start_process()
