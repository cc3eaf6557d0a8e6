"""What tests deploy in Pulsar's own runtime: functions on flights, which the demo has, and wrappers with a fault."""

import json
import time
from pathlib import Path
from typing import Any

import pulsar

from seqdedupe.functions import DedupeFunction, instance

LOOK_SECONDS = 0.01


def arrival(flight: dict[str, Any]) -> str:
    return f"{flight['number']} {flight['dest']} {flight['arr_delay']}"


def departure(flight: dict[str, Any]) -> str:
    return f"{flight['number']} {flight['origin']} {flight['dep_delay']}"


def aircraft(flight: dict[str, Any]) -> str:
    return f"{flight['number']} {flight['tailnum']}"


class One(pulsar.Function):  # type: ignore[misc]  # Pulsar's client has no types
    """One result for each flight."""

    def process(self, input: bytes, context: Any) -> str:
        flight = json.loads(input)
        config = context.get_user_config_map()
        time.sleep(config.get("pause_ms", 0) / 1000)
        if "held" in config:
            _hold(flight["number"], config["hold_from"], Path(config["held"]), context)
        return arrival(flight)


class Several(One):
    """Two for the output topic, one for another."""

    def process(self, input: bytes, context: Any) -> str:
        flight = json.loads(input)
        config = context.get_user_config_map()
        context.publish(config["output_topic"], departure(flight))
        context.publish(config["other"], aircraft(flight))
        return super().process(input, context)


def _hold(number: int, first: int, held: Path, context: Any) -> None:
    """From a flight on instance 0 stands still, and says at which, until it is released."""
    let_go = held.with_suffix(".go")
    if number < first or str(context.get_instance_id()) != "0" or let_go.exists():
        return
    held.write_text(f"{number}\n")
    while not let_go.exists():
        time.sleep(LOOK_SECONDS)


class Unchecked(DedupeFunction):
    """Takes any subscription."""

    def process(self, input: object, context: Any) -> None:
        instance.check_deployment = lambda details: None  # type: ignore[attr-defined]
        super().process(input, context)


class Raising(DedupeFunction):
    """Gives an input whose outcome is unknown back to the runtime, and goes on with the next one."""

    def process(self, input: object, context: Any) -> None:
        super().process(input, context)
        while self._instance.in_flight:
            if self._instance.counts["unknown"]:
                self._instance.close()
                self._instance = None
                raise RuntimeError("an outcome is unknown")
            time.sleep(LOOK_SECONDS)
