"""A function at work on flights in Pulsar's own runtime, and what goes wrong around it."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pulsar_broker.instance import FULL_NAME, Instance, details
from pulsar_broker.standalone import Broker
from seqdedupe.client import blocking
from seqdedupe.errors import NotFoundError, SeqdedupeError
from seqdedupe.functions.wheel import build
from seqdedupe.testing import Sidecar
from tests.client.fronts import fronts
from tests.pulsar import deployed
from tests.pulsar.admin import call
from tests.pulsar.flights import LIMIT_SECONDS, LOOK_SECONDS, Result, differences, flights, give, read
from tests.pulsar.owners import kill_and_start

DOUBTED_FRAMES = 3
MAX_IN_FLIGHT_MESSAGES = 100
_LOG_CHARACTERS_SHOWN = 3000

Fault = Callable[[], Coroutine[Any, Any, None]]


def wheel_in(folder: Path) -> Path:
    """The wheel of `deployed`, as a user makes one."""
    wheel = folder / "deployed-1-py3-none-any.whl"
    build([Path(str(deployed.__file__))], wheel)
    return wheel


def path_of(topic: str) -> str:
    """For a topic, in calls of an admin URL."""
    return topic.replace("://", "/")


def pulsar_keys(broker: Broker, namespace: str) -> dict[str, Any]:
    """For a sidecar that writes there. In plain topics a stock consumer can tell which entries are void."""
    return broker.sidecar_keys | {"pulsar_namespaces": namespace, "pulsar_entry_format": "plain"}


def stored(sidecar: Sidecar, topic: str) -> list[Result]:
    """What a topic of a sidecar's holds."""
    with blocking.Client(sidecar.address) as client:
        try:
            with client.reader(topic) as reader:
                return [Result((one.key or b"").decode(), (one.payload or b"").decode()) for one in reader]
        except NotFoundError:
            return []


async def until(holds: Callable[[], bool], *instances: Instance) -> None:
    """Waits for what no event tells of. Raises TimeoutError with what the instances have said last."""
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            while True:
                if await asyncio.to_thread(holds):
                    return
                await asyncio.sleep(LOOK_SECONDS)
    except TimeoutError as e:
        raise TimeoutError("\n".join(one.log[-_LOG_CHARACTERS_SHOWN:] for one in instances)) from e


def left(broker: Broker, topic: str, *, is_partitioned: bool = False) -> int | None:
    """Inputs that are not acknowledged by the function that has the topic's name; None if that cannot be known now."""
    stats = "partitioned-stats" if is_partitioned else "stats"
    try:
        answer = call(broker, "GET", f"{path_of(topic)}/{stats}?getPreciseBacklog=true")
    except OSError:
        return None
    subscription = answer["subscriptions"].get(f"public/default/{topic.rpartition('/')[2]}")
    return None if subscription is None else int(subscription["msgBacklog"])


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a function is deployed, and on how much."""

    flights: int
    partitions: int = 0
    """For the input topic; 0 if it is not partitioned."""
    instances: int = 1
    has_several: bool = False
    """Outputs for an input."""
    pause_ms: float = 0
    """That the function takes for an input."""


class Work:
    """Within its block the function is at work. Each fault gives it some of the flights, and happens amid these.

    Every second portion of them comes in batches, the others singly.
    """

    def __init__(self, home: Path, broker: Broker, folder: Path, wheel: Path, name: str, case: Case) -> None:
        self._home, self._broker, self._folder, self._wheel, self._case = home, broker, folder, wheel, case
        self._name = name
        self._namespace = f"public/{name}"
        self.input = f"persistent://public/default/{name}"
        self.output, self.other = (f"persistent://{self._namespace}/{each}" for each in ("output", "other"))
        self._flights = flights(case.flights)
        self._portion = case.flights
        self._portions = self._given = self._kills = 0
        self._instances: list[Instance] = []

    async def __aenter__(self) -> Self:
        never = json.dumps({"subscription_expiration_time_minutes": 0}).encode()
        call(self._broker, "PUT", f"namespaces/{self._namespace}", body=never)
        if self._case.partitions:
            partitions = str(self._case.partitions).encode()
            call(self._broker, "PUT", f"{path_of(self.input)}/partitions", body=partitions)
        async with AsyncExitStack() as stack:
            keys = pulsar_keys(self._broker, self._namespace)
            self._sidecar = stack.enter_context(Sidecar(self._folder / "sidecar", **keys))
            (self._front,) = await stack.enter_async_context(fronts(self._sidecar.address, 1))
            self._client = stack.enter_context(blocking.Client(self._sidecar.address))
            for number in range(self._case.instances):
                where = self._home, self._folder, self._broker.service_url
                instance = Instance(*where, self._wheel, self._details(), number)
                self._instances.append(stack.enter_context(instance))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *failure: Any) -> None:
        await self._stack.__aexit__(*failure)

    def _details(self) -> dict[str, Any]:
        config = {
            "wrapped": "deployed.Several" if self._case.has_several else "deployed.One",
            "sidecar_address": self._front.address,
            "output_topic": self.output,
            "other": self.other,
            "pause_ms": self._case.pause_ms,
            "max_in_flight_messages": MAX_IN_FLIGHT_MESSAGES,
        }
        more: dict[str, Any] = {"userConfig": json.dumps(config), "parallelism": self._case.instances}
        return details(self._name, self.input, class_name=FULL_NAME, **more)

    async def through(self, faults: Sequence[Fault]) -> None:
        """Until all is done, with these faults on the way."""
        self._portion = len(self._flights) // (len(faults) + 1)
        for fault in faults:
            await fault()
        await self._give(len(self._flights))
        await self._until(lambda: self._count() >= self._given * self._outputs)
        await self._until(self._is_acknowledged)

    def differences(self) -> Counter[str]:
        """What is wrong with what the topics hold; nothing if it is what is expected."""
        if not self._case.has_several:
            return self._compared(self.output, deployed.arrival)
        output = self._compared(self.output, deployed.departure, deployed.arrival)
        return output + self._compared(self.other, deployed.aircraft)

    def _compared(self, topic: str, *functions: Callable[[dict[str, Any]], str]) -> Counter[str]:
        expected = [Result(one.key, function(one.fields)) for one in self._flights for function in functions]
        return differences(read(self._broker.service_url, topic), expected, by_key=self._case.partitions > 0)

    # -- how far it is ---------------------------------------------------------------------------------------------

    @property
    def _outputs(self) -> int:
        """For one flight, in the output topic."""
        return 2 if self._case.has_several else 1

    def _count(self) -> int:
        """How many results the output topic holds; 0 if that cannot be known now."""
        try:
            return self._client.ends(self.output).last.index + 1
        except SeqdedupeError:
            return 0

    def _is_acknowledged(self) -> bool:
        return left(self._broker, self.input, is_partitioned=self._case.partitions > 0) == 0

    async def _until(self, holds: Callable[[], bool]) -> None:
        await until(holds, *self._instances)

    async def _give(self, count: int) -> None:
        """This many flights more, or all that are left."""
        some = self._flights[self._given : self._given + count]
        await asyncio.to_thread(give, self._broker.service_url, self.input, some, batched=self._portions % 2 == 0)
        self._given += len(some)
        self._portions += 1

    async def _goes_on(self) -> None:
        """Gives a portion, and returns when the first of its results is there."""
        before = self._given * self._outputs
        await self._give(self._portion)
        await self._until(lambda: self._count() > before)

    # -- faults: each is over when its method returns --------------------------------------------------------------

    async def kill(self) -> None:
        """-9, one instance after the other."""
        await self._goes_on()
        self._instances[self._kills % len(self._instances)].kill()
        self._kills += 1

    async def doubt(self) -> None:
        """Some frames get the verdict Unknown, and reach nobody."""
        doubted = self._front.doubted + DOUBTED_FRAMES
        self._front.doubts = lambda _: self._front.doubted < doubted
        await self._give(self._portion)
        await self._until(lambda: self._front.doubted >= doubted)

    async def lose_receipts(self) -> None:
        """What the sidecar answers gets lost, and then the connection breaks."""
        swallowed = self._front.swallowed
        self._front.swallows_receipts = True
        await self._give(self._portion)
        await self._until(lambda: self._front.swallowed > swallowed)
        await self._front.stop()
        self._front.swallows_receipts = False
        await self._front.start()

    async def unload_input(self) -> None:
        await self._goes_on()
        await asyncio.to_thread(call, self._broker, "PUT", f"{path_of(self.input)}/unload")

    async def unload_output(self) -> None:
        await self._goes_on()
        await asyncio.to_thread(call, self._broker, "PUT", f"{path_of(self.output)}/unload")

    async def kill_sidecar(self) -> None:
        await self._goes_on()
        self._sidecar.kill()
        await self._start_sidecar()

    async def terminate(self) -> None:
        """An instance is asked to end while it waits for a sidecar that was killed."""
        before = [len(one.log) for one in self._instances]
        self._sidecar.kill()
        await self._give(self._portion)
        waiting: list[Instance] = []

        def some_wait() -> bool:
            waiting[:] = [
                one for one, seen in zip(self._instances, before, strict=True) if "waiting to publish" in one.log[seen:]
            ]
            return bool(waiting)

        await self._until(some_wait)
        starts = waiting[0].starts
        waiting[0].terminate()
        await self._until(lambda: waiting[0].starts > starts)
        await self._start_sidecar()

    async def kill_broker(self) -> None:
        await self._goes_on()
        await kill_and_start(self._broker)

    async def _start_sidecar(self) -> None:
        self._sidecar.spawn()
        await asyncio.to_thread(self._sidecar.wait_until_serving)
