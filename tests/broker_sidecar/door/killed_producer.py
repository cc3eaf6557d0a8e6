"""A producer of Pulsar's Python client that is killed: `killed_producer.py URL TOPIC NAME KNOWN BACK SEED PAUSE_MS`.

`KilledProducer.java` and `stock_go/killed/main.go` are the same for the clients of Java and Go. Each sends messages
`NAME/ID` with IDs from 1 on, in batches, until its standard input ends. Then it waits for the receipts. It begins BACK
messages before the first ID that the topic does not have, as far as it knows: after KNOWN, or after the last ID that it
is told when it opens. So its first batch mixes old and new messages. It prints these lines:

    refused WHY                  the producer cannot be opened, and is tried again
    opened LAST                  the last ID that the client was told
    sent FIRST LAST              before these are sent
    receipt ID LEDGER ENTRY ROW
    error ID WHY
    done
"""

import os
import random
import sys
import threading
import time
from typing import Any

import pulsar

# The client's own library prints there too.
_out = os.dup(1)
os.dup2(2, 1)


def say(*words: object) -> None:
    # One call, so lines of several threads do not mix.
    os.write(_out, (" ".join(map(str, words)) + "\n").encode())


def wait_for_end(over: threading.Event) -> None:
    sys.stdin.read()
    over.set()


def main(url: str, topic: str, name: str, known: str, back: str, seed: str, pause_ms: str) -> None:
    over = threading.Event()
    threading.Thread(target=wait_for_end, args=(over,), daemon=True).start()
    client = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    producer = None
    while producer is None:
        try:
            producer = client.create_producer(
                topic,
                producer_name=name,
                batching_enabled=True,
                batching_max_publish_delay_ms=2,
                compression_type=pulsar.CompressionType.ZLib,
                block_if_queue_full=True,
                send_timeout_millis=0,
            )
        except pulsar.PulsarException as e:
            say("refused", repr(e))
            if over.wait(0.05):
                return
    last = producer.last_sequence_id()
    say("opened", last)
    rng = random.Random(int(seed))
    first = number = max(1, max(last, int(known)) + 1 - int(back))
    burst = int(back)
    answered = threading.Semaphore(0)

    def take(result: Any, place: Any, number: int) -> None:
        if result == pulsar.Result.Ok:
            say("receipt", number, place.ledger_id(), place.entry_id(), place.batch_index())
        else:
            say("error", number, result)
        answered.release()

    while not over.is_set():
        end = number + burst + rng.randrange(1, 30)
        say("sent", number, end - 1)
        for one in range(number, end):
            producer.send_async(
                b"%s/%d" % (name.encode(), one),
                lambda result, place, one=one: take(result, place, one),
                sequence_id=one,
            )
        number, burst = end, 0
        time.sleep(rng.uniform(0, int(pause_ms) / 1e3))
    for _ in range(first, number):
        answered.acquire()
    client.close()
    say("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
