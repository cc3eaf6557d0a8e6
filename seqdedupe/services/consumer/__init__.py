"""The transactional consumer: each message of a topic takes effect in the user's database exactly once.

Begin with `consumer`, one process's life, and `work`, what it does with messages. `consumer_row` says which process
works, and on which partitions; `partition_shares` works on these. `message_arrivals` is what they wait for,
`dead_letters` what was set aside, and `database` has the tables.
"""

from seqdedupe.services.consumer.consumer import Consumer
from seqdedupe.services.consumer.work import ConsumerConfig

__all__ = ["Consumer", "ConsumerConfig"]
