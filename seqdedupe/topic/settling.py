"""What a topic has handed to its log, and what becomes of it: confirmed, refused, or to be found out.

Confirming makes messages persisted and readable in one step, before their receipt is given and before anything is
called Dup because of them.
"""

import logging
from abc import abstractmethod

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.contract import Failure, Outcome, Runs, last_of
from seqdedupe.topic.answers import Refusal
from seqdedupe.topic.flight import Admitted, Changing
from seqdedupe.topic.logged import LoggedTopic
from seqdedupe.topic.state import State

logger = logging.getLogger("seqdedupe.topic")

FIRST_REST_SECONDS = 0.25
LONGEST_REST_SECONDS = 4.0


class SettlingTopic(LoggedTopic):
    """A topic on a log of ours, with what is in flight. Why it may append, and when again, is for `owning` to know."""

    _own_ownership = 0
    """Of what is appended now."""
    _opening = 0
    """The outcomes of earlier openings of the log are not heard any more."""
    _is_recovering = False
    _failed_meanwhile = False
    _rest_seconds = 0.0
    """Before a log that has refused is opened again: more each time that it takes no message in between."""

    @abstractmethod
    async def _recover(self, rest_seconds: float = 0.0) -> None:
        """Opens the log for writing again after so long, and finds out what became of what is in flight."""

    # -- handing over ------------------------------------------------------------------------------------------

    def _hand_over(self, item: Admitted) -> None:
        """Hands to the log what was decided."""
        try:
            # First, or the log might have what nobody here knows of.
            self.flight.add(item)
        except MemoryError as e:
            item.reply(Refusal(item.receipt.frame, self._out_of_step(e)))
            return
        frame = item.frame
        try:
            self.log.append(frame.encoded, frame.rows, frame.column_bytes)
        except Exception as e:  # noqa: BLE001 (whatever it is: whether the log has it is found out)
            self._out_of_step(e)
        self.next_index += frame.rows

    def _hand_over_change(self, item: Changing) -> None:
        self.flight.add(item)
        try:
            self.log.append_control(item.body)
        except Exception as e:  # noqa: BLE001 (as of a frame)
            self._out_of_step(e)

    def _out_of_step(self, e: BaseException | None) -> SeqdedupeError:
        """What counts as in flight may not be what the log was handed: that is found out, as an unknown outcome is.

        Else IDs would be in flight for ever. Returns why nothing is taken meanwhile.
        """
        # Its outcomes would be taken for those of others.
        self._opening += 1
        logger.error("topic %s and its log are out of step", self.name, exc_info=e)
        self._log_failed(Failure.UNKNOWN, f"{type(e).__name__} in the sidecar")
        return error("RECOVERING", f"topic {self.name} takes no messages now: {self.why}")

    # -- outcomes ----------------------------------------------------------------------------------------------

    def _settle(self, outcome: Outcome) -> None:
        """The log tells what became of the oldest appends in flight."""
        confirmed: list[Admitted | Changing] = []
        failed: Exception | None = None
        last: Runs = ()
        try:
            for item, runs in zip(self.flight, outcome.runs, strict=False):
                self._confirm(item, runs)
                confirmed.append(item)
                last = runs or last
        except Exception as e:  # noqa: BLE001 (whatever it is: the log has those behind it all the same)
            failed = e
        for _ in confirmed:
            self.flight.take()
        if last:
            self._rest_seconds = 0.0
            self.last_ownership = self._own_ownership
            self.last_message_id = last_of(last)
            self.confirmed.tell()
        for item in confirmed:
            self._answer(item)
        if failed is not None:
            self._out_of_step(failed)
            self.flight.tell()
            return
        if outcome.written:
            self._answer_early(outcome.written)
        if outcome.failure is not None:
            self._log_failed(outcome.failure, outcome.why)
        self.flight.tell()
        self.snapshotter.stored(len(confirmed))

    def _confirm(self, item: Admitted | Changing, runs: Runs) -> None:
        """It is in the log."""
        if isinstance(item, Changing):
            self._apply(item.change, self.confirmed_index)
            return
        item.receipt.runs = runs
        frame = item.frame
        if self.window is None:
            self.producers.persist(frame.view, frame.places, frame.producer_rows)
        else:
            self.window.confirm(frame.rows)
        self.confirmed_index += frame.rows

    def _log_failed(self, failure: Failure, why: str) -> None:
        self.counters.log_failures += 1
        logger.warning("the log of topic %s failed (%s): %s", self.name, failure.value, why)
        if self._is_recovering:
            # Nothing was handed over since that began, so this says nothing of what is in flight; it tries again.
            self._failed_meanwhile = True
            return
        if failure is Failure.REFUSED:
            self._fail_in_flight(self._not_appended("LOG_REFUSED", why))
            self._set_state(State.READ_ONLY, why)
            # A full disk often has room for what opening the log writes: it would serve, and refuse, again and again.
            self._spawn(self._recover(self._rest_seconds))
            self._rest_seconds = min(max(2 * self._rest_seconds, FIRST_REST_SECONDS), LONGEST_REST_SECONDS)
            return
        self._set_state(State.RECOVERING, f"what became of the last appends is being found out: {why}")
        self._spawn(self._recover())

    def check_has_epochs(self) -> None:
        """Before new sessions. Raises RECOVERING if this term has no epoch left for them, and begins another one: what
        is in flight is found out before."""
        if self.sessions.term_is_used_up:
            self._set_state(State.RECOVERING, f"it was opened as often as it can be in term {self.term}")
            self._spawn(self._recover())
            self.check_serving()

    def _not_appended(self, reason: str, why: str) -> SeqdedupeError:
        return error(reason, f"topic {self.name} could not write it to its log: {why}")

    def _fail_in_flight(self, e: SeqdedupeError, *, of_changes: SeqdedupeError | None = None) -> None:
        """What is in flight is given up: nothing of it counts as pushed any more."""
        failed = [self.flight.take() for _ in range(len(self.flight))]
        self.producers.fail_in_flight()
        if self.window is not None:
            self.window.fail()
        self.next_index = self.confirmed_index
        for item in failed:
            if isinstance(item, Changing):
                item.settled(of_changes or e)
                continue
            self.counters.refused += 1
            if not item.is_told:
                item.reply(Refusal(item.receipt.frame, e))
        if any(isinstance(item, Admitted) and item.is_told for item in failed):
            # Whoever was told that it is written learns by a resume that it is not.
            for end in list(self._streams.values()):
                end(e)
        self.flight.tell()
