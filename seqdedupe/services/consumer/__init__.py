"""The transactional consumer: each message of a topic takes effect in the user's database exactly once."""

from seqdedupe.services.consumer.config import ConsumerConfig
from seqdedupe.services.consumer.consumer import Consumer

__all__ = ["Consumer", "ConsumerConfig"]
