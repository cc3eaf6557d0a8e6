"""What to say about options that are none: those of the connectors for Kafka and Pulsar, and those mistyped."""

import difflib
from collections.abc import Sequence

_ELSEWHERE = {
    "assign": "topics",
    "endingoffsetsbytimestamp": "endingTime",
    "endingtimestamp": "endingTime",
    "kafka.bootstrap.servers": "service.url",
    "kafkaconsumer.polltimeoutms": "readTimeoutSeconds",
    "maxmessagespertrigger": "maxOffsetsPerTrigger",
    "path": "topic",
    "polltimeoutms": "readTimeoutSeconds",
    "startingoffsetsbytimestamp": "startingTime",
    "startingtimestamp": "startingTime",
    "subscribe": "topics",
    "subscribepattern": "topicsPattern",
}
"""What says the same in other connectors."""

_NOBODY = "positions are in the query's checkpoint, no consumer group or subscription keeps any: leave it out"
_WAITS = "a reader waits by itself, and goes on where it was: leave it out"

_MEANINGLESS = {
    "allowdifferenttopicschemas": "value is bytes, whatever their schema: leave it out",
    "fetchoffset.numretries": _WAITS,
    "fetchoffset.retryintervalms": _WAITS,
    "groupidprefix": _NOBODY,
    "includeheaders": "the column __messageProperties is always there: leave it out",
    "kafka.group.id": _NOBODY,
    "predefinedsubscription": _NOBODY,
    "startingoffsetsbytimestampstrategy": "a time after the end is the end: leave it out",
    "subscriptionprefix": _NOBODY,
    "subscriptiontype": _NOBODY,
    "waitingfornonexistedtopic": "topics have to be there, those of a topicsPattern may come later: leave it out",
}
"""What has no meaning here, and why."""

_FOREIGN = {
    "kafka.": "it is of Kafka's clients: here service.url, authParams and the files tls… say who is reached, and how",
    "pulsar.admin.": "it is of Pulsar's connector: here admin.url and pulsar.client.… are all there is of it",
    "pulsar.producer.": "it is of Pulsar's connector: batches and their times are the client's own",
    "pulsar.reader.": "it is of Pulsar's connector: leave it out",
}
"""The same for all that begin so."""


def advice(name: str, names: Sequence[str]) -> str:
    """About an option, its name in lower case, that is none of these."""
    known = {one.lower(): one for one in names}
    near = difflib.get_close_matches(name, known, 1)
    elsewhere = _ELSEWHERE.get(name)
    instead = elsewhere if elsewhere in names else known[near[0]] if near else None
    if name in _MEANINGLESS:
        return _MEANINGLESS[name]
    if instead is not None:
        return f"did you mean {instead}?"
    for beginning, why in _FOREIGN.items():
        if name.startswith(beginning):
            return why
    return "there are " + ", ".join(one for one in names if not one.startswith(("pulsar.", "admin.")))
