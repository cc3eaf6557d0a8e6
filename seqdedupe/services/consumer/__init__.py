"""The transactional consumer: each message of a topic takes effect in the user's database exactly once.

Begin with `consumer`, the main loop of a process and its share of a partitioned topic, and `work`, the handling of
messages. `database` defines the tables, and records which process works, and on which partitions. `message_arrivals`
waits for messages, and `dead_letters` stores the messages that are set aside.
"""

from seqdedupe.services.consumer.consumer import Consumer
from seqdedupe.services.consumer.work import ConsumerConfig

__all__ = ["Consumer", "ConsumerConfig"]
