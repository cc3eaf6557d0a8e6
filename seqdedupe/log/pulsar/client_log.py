"""What Pulsar's client tells besides what it raises."""

import pulsar


def client_logger() -> pulsar.FileLogger:
    """Its errors, to standard error, in its own words.

    Never a logger of Python's. The client calls one at every step, however little of it is to be shown, and while it
    holds locks of its own: whoever has Python's lock then and waits for one of those waits for ever. It also takes
    longer than all else about a message.
    """
    return pulsar.FileLogger(pulsar.LoggerLevel.Error, "/dev/stderr")
