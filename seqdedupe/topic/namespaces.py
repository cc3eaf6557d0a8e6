"""The policies of namespaces: in the store, and in force in every topic of the namespace."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.store.db import Store
from seqdedupe.topic.control import decode_policy, encode
from seqdedupe.topic.policy import Applied, Policy
from seqdedupe.topic.tasks import again_until

MAX_NAMESPACE_POLICIES = 10_000


class Namespaces:
    """What is set for namespaces, over the sidecar's `defaults`. `changed` is told the name of one that has changed."""

    def __init__(self, store: Store, defaults: Applied, changed: Callable[[str], None]) -> None:
        self._store = store
        self._defaults = defaults
        self._changed = changed
        self._policies: dict[str, Policy] = {}
        self._one_at_a_time = asyncio.Lock()
        self._is_closed = False
        self._background: set[asyncio.Task[None]] = set()

    def load(self) -> None:
        """Reads what is stored. Raises STORE_DAMAGED, NEWER_FORMAT, OLDER_FORMAT, STORE_UNAVAILABLE."""
        self._policies = {name: decode_policy(body) for name, body in self._store.namespace_policies()}

    def policy(self, namespace: str) -> Policy:
        """What is set for this namespace."""
        return self._policies.get(namespace, Policy())

    def applied(self, namespace: str) -> Applied:
        """What its topics inherit."""
        return self._defaults.under(self.policy(namespace))

    async def change(self, namespace: str, change: Callable[[Policy], Policy]) -> None:
        """Sets the policy to what `change` makes of the one that is set: durable and in force on return.

        Raises what `change` raises, INVALID_REQUEST if there are too many, DRAINING; STORE_UNAVAILABLE: then it is as
        it was. Whoever is cancelled here does not know.
        """
        if self._is_closed:
            raise error("DRAINING", "the sidecar is shutting down")
        await asyncio.shield(self._in_background(self._change(namespace, change)))

    async def _change(self, namespace: str, change: Callable[[Policy], Policy]) -> None:
        async with self._one_at_a_time:
            policy = change(self.policy(namespace))
            if namespace not in self._policies and len(self._policies) >= MAX_NAMESPACE_POLICIES:
                raise error("INVALID_REQUEST", f"{MAX_NAMESPACE_POLICIES} namespaces have a policy: more may not")
            try:
                await self._write(namespace, policy)
            except SeqdedupeError:
                # The store may have it all the same, and at the next start it would be in force.
                self._in_background(again_until(lambda: self._is_durable(namespace)))
                raise
            self._policies.pop(namespace, None)
            if policy != Policy():
                self._policies[namespace] = policy
            self._changed(namespace)

    async def _write(self, namespace: str, policy: Policy) -> None:
        await self._store.put_namespace_policy(namespace, encode(policy) if policy != Policy() else None)

    async def _is_durable(self, namespace: str) -> bool:
        """Writes what is in force again. Whether that has ended."""
        async with self._one_at_a_time:
            if self._is_closed:
                return True
            try:
                await self._write(namespace, self.policy(namespace))
            except SeqdedupeError:
                return False
            return True

    async def close(self) -> None:
        """Takes nothing more; finishes what is under way. What is written again and again is given up."""
        self._is_closed = True
        await asyncio.gather(*self._background, return_exceptions=True)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._background.discard(task)
        # Whoever asked for it may have gone.
        if not task.cancelled():
            task.exception()
