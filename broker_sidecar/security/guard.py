"""Who may use a sidecar: all that its configuration says of it, in one place."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from broker_sidecar.config import Config
from broker_sidecar.rpc import Context
from broker_sidecar.security import rules_file
from broker_sidecar.security.audit import Audit
from broker_sidecar.security.authentication import Authentication
from broker_sidecar.security.gate import Gate
from broker_sidecar.security.permissions import NO_RULES, Permissions
from broker_sidecar.security.rules_file import RulesFile
from broker_sidecar.security.subject import Subject
from broker_sidecar.security.trail import Trail
from broker_sidecar.security.watching import Watched, Watching
from broker_sidecar.streams import Streams


class Guard:
    """Knows callers from the time that it has begun, judges what they may do, and writes down what it is to.

    `on_read_again` is called when a file that an operator may replace was read again: see `has_problem`.
    """

    def __init__(self, config: Config, on_read_again: Callable[[], None]) -> None:
        """Raises INVALID_CONFIGURATION, AUDIT_UNAVAILABLE, AUDIT_DAMAGED."""
        self._config = config
        self._on_read_again = on_read_again
        self.trail = Trail(Audit(Path(config.audit_file)) if config.audit_file else None)
        self._rules = self._watched_rules()
        self.permissions = Permissions(self._rules.value if self._rules else NO_RULES, self.trail.denied)

    def begin(self, streams: Streams, called: Callable[[Subject], None]) -> None:
        """Finds out from now on who calls, and tells `called`. Makes the data directory's token if there is none.

        Raises INVALID_CONFIGURATION; OSError.
        """
        self.authentication = Authentication(self._config, streams)
        self._called = called
        rules = [self._rules] if self._rules else []
        self._watching = Watching([*self.authentication.watched, *rules], self._was_read_again)

    def guarded(self, handler: grpc.GenericRpcHandler) -> Gate:
        """The handler's calls, for those who may make them."""
        return Gate(handler, self._authenticate, self.permissions, self.trail)

    def _authenticate(self, context: Context) -> Subject:
        subject = self.authentication(context)
        self._called(subject)
        return subject

    @property
    def has_problem(self) -> bool:
        """Whether a file that was replaced says something that is not in force."""
        return self._watching.has_problem

    async def keep_looking(self) -> None:
        """Looks at the files again and again."""
        await self._watching.keep_looking()

    def reload(self) -> None:
        """Reads all of them again, and goes on in the file that has the audit trail's name."""
        self.trail.rotated()
        self._watching.reload()

    def _watched_rules(self) -> Watched[RulesFile] | None:
        if not self._config.rules_file:
            return None
        path = Path(self._config.rules_file)
        return Watched("the rules file", [path], lambda: rules_file.read(path), self._replace_rules)

    def _replace_rules(self) -> None:
        if self._rules is not None:
            self.permissions.replace(self._rules.value)

    def _was_read_again(self, one: Watched[Any]) -> None:
        self.trail.read_again(one.what, one.problem)
        self._on_read_again()
