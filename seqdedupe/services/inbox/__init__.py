"""The inbox: messages take effect in the order that the business means, whatever order they arrive in."""

from seqdedupe.services.inbox.inbox import Inbox
from seqdedupe.services.inbox.waiting import Waiting

__all__ = ["Inbox", "Waiting"]
