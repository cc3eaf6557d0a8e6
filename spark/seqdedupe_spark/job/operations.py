"""What an operator does to a job's positions."""

from seqdedupe.errors import ConfigurationError, DamagedError, InvalidRequestError, PositionError, error
from seqdedupe.message_id import Position
from seqdedupe.names import topic_name
from seqdedupe_spark import places, planning, stock
from seqdedupe_spark.cluster.settings import Service
from seqdedupe_spark.job.positions import FIRST_START
from seqdedupe_spark.options import Selection
from seqdedupe_spark.planning import Ends, earliest, find_loss
from seqdedupe_spark.stock import StockEnds
from seqdedupe_spark.stores.contract import OutputStore, Stored, StoreFactory, check_name


def positions_of(store: StoreFactory, job: str) -> dict[str, Stored]:
    """The stored positions of a job, by topic. Raises INVALID_OPTION if the store does not know the job."""
    with store() as opened:
        return {topic: stored for topic, stored in sorted(_stored(opened, job).items()) if topic != FIRST_START}


def _stored(store: OutputStore, job: str) -> dict[str, Stored]:
    check_name("job", job)
    try:
        stored = store.positions(job)
    except ConfigurationError as e:
        if e.reason != "INVALID_OUTPUT":
            raise
        raise error("INVALID_OPTION", f"store: no job has its positions there: {e.message}") from e
    if not stored:
        what = f"job {job} has no positions in this store; nothing was changed"
        raise error("INVALID_OPTION", what, hint="Is the job's name written as it was run, and is this its store?")
    return stored


def reset_position(
    store: StoreFactory, job: str, topic: str, place: str, service: Service
) -> tuple[Stored | None, Stored]:
    """Stores a topic's position anew, in the next epoch, and drops its watermarks; what was stored, and what is now.

    `place` is earliest, latest, a number, the index of the first message to be read, or a message ID or position, that
    of the last message that is not to be read. A run that was planned before it commits nothing any more. Raises
    INVALID_OPTION, also for a job that the store does not know, NotFoundError, or PositionError if the topic cannot be
    read on from there.
    """
    topic = topic_name(topic)
    with planning.open_client(planning.of_job(service, job), Selection("topic", (topic,))) as client, store() as opened:
        holder = client if isinstance(client, planning.Holder) and isinstance(client.ends(topic), StockEnds) else None
        if holder is not None:
            holder.subscribe(topic)
        position = _position(client, topic, place)
        while True:
            before = _stored(opened, job).get(topic)
            after = Stored(position, before.epoch + 1 if before else 0)
            if opened.replace(job, topic, before, after):
                if holder is not None:
                    holder.keep_from(topic, position)
                return before, after


def _position(client: planning.Client, topic: str, place: str) -> Position:
    ends = client.ends(topic)
    if place in ("earliest", "latest"):
        return earliest(ends) if place == "earliest" else ends.last
    if place.isascii() and place.isdigit():
        position = _before_index(topic, place, ends)
    else:
        try:
            position = stock.parse(place)
        except InvalidRequestError as e:
            raise error("INVALID_OPTION", f"to: {e.message}") from e
    if isinstance(ends, StockEnds):
        position = stock.given(position)
    if loss := find_loss(topic, position, ends):
        raise error(loss.reason, loss.message, topic=topic)
    return position if isinstance(ends, StockEnds) else _completed(client, topic, position)


def _before_index(topic: str, text: str, ends: Ends) -> Position:
    if isinstance(ends, StockEnds):
        raise error("INVALID_OPTION", f"to: no sidecar writes {topic}, it has no indexes: give a message ID")
    try:
        return Position.before(ends.last.incarnation, places.number(text, 0))
    except ValueError as e:
        raise error("INVALID_OPTION", f"to: {e}") from e


def _completed(client: planning.Client, topic: str, position: Position) -> Position:
    """The position with all that says which message it is after: a message ID alone fits every history of the topic.

    Raises POSITION_DIVERGED if another message stands there.
    """
    if position.index < 0:
        return position
    try:
        found = client.position_at(topic, position.index)
    except (DamagedError, PositionError):
        return position  # what follows it can be read all the same
    if not found.is_same(position):
        what = f"the message of {topic} with index {position.index} is {found}, not that of the position {position}"
        raise error("POSITION_DIVERGED", what, topic=topic)
    return found
