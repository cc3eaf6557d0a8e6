"""The transactional consumer: each message of a topic takes effect in the user's database exactly once."""

from seqdedupe.services.consumer.consumer import Consumer
from seqdedupe.services.consumer.work import ConsumerConfig

__all__ = ["Consumer", "ConsumerConfig"]
