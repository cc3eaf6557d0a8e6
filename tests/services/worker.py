"""A process that consumes: `python -m tests.services.worker ADDRESS TOPIC URL`. It says when it works."""

import sys

from sqlalchemy import create_engine

from seqdedupe.client.blocking import Client
from seqdedupe.services.consumer import Consumer, ConsumerConfig
from tests.services.effects import write


def main() -> None:
    address, topic, url = sys.argv[1:]
    with Client(address) as client:
        config = ConsumerConfig(max_batch_messages=20)
        Consumer(client, topic, "c", create_engine(url), write, config=config).run()


if __name__ == "__main__":
    main()
