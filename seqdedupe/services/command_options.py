"""Options shared by the command lines that run a service or show its lag: `--metrics-listen`, and limits of the lag."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import click

from seqdedupe.client.blocking import Client
from seqdedupe.client.blocking.loop import run
from seqdedupe.command import FAILED, Seconds, json_text, needing, print_json, print_table, say
from seqdedupe.message_id import Position
from seqdedupe.services.activity import Lag, Service, lags_after, total
from seqdedupe.sidecar_options import Command

# -- Metrics of a service, while its command runs.

METRICS_VARIABLE = "SEQDEDUPE_METRICS_LISTEN"

_LISTEN = "seqdedupe.metrics_listen"
_ALLOW = "seqdedupe.allow_insecure_listen"


def metrics_options(command: Command) -> Command:
    """Add `--metrics-listen` and `--allow-insecure-listen`, which `metrics_told` uses."""
    allow = click.option(
        "--allow-insecure-listen",
        is_flag=True,
        help="Allow other machines to connect to --metrics-listen, without encryption and authentication.",
        callback=partial(_remember, _ALLOW),
        expose_value=False,
    )
    listen = click.option(
        "--metrics-listen",
        envvar=METRICS_VARIABLE,
        show_envvar=True,
        metavar="HOST:PORT",
        help="Serve /metrics for Prometheus, and /healthz, at this address.",
        callback=partial(_remember, _LISTEN),
        expose_value=False,
    )
    return listen(allow(command))


def _remember(key: str, context: click.Context, _option: click.Parameter, value: object) -> None:
    context.meta[key] = value


def metrics_told(*, as_json: bool) -> Callable[[Service], AbstractContextManager[None]]:
    """Return a function that makes a context manager from a service. If `--metrics-listen` is set, the command serves
    the service's metrics within this context, and prints the address on standard error. The context manager raises
    INVALID_CONFIGURATION, INSECURE_LISTEN."""
    told = click.get_current_context().meta
    return partial(_metrics_of, told[_LISTEN], told[_ALLOW], as_json)


@contextmanager
def _metrics_of(listen: str | None, allow_insecure: bool, as_json: bool, service: Service) -> Iterator[None]:
    if not listen:
        yield
        return
    with needing("metrics need", "services"):
        from seqdedupe.services.metrics import ServiceMetrics
    with ServiceMetrics(listen, service, allow_insecure_listen=allow_insecure) as metrics:
        if as_json:
            click.echo(json_text({"metrics": {"address": metrics.address}}), err=True)
        else:
            say("seqdedupe", f"metrics at http://{metrics.address}/metrics")
        yield


# -- The lag of a service that need not be running.


def lag_options(command: Command) -> Command:
    """Add `--max-messages` and `--max-seconds`, and pass their values to the command."""
    seconds = click.option(
        "--max-seconds",
        type=Seconds(),
        metavar="S",
        help="Exit status 1 if the oldest remaining message is older than S seconds.",
    )
    messages = click.option(
        "--max-messages", type=click.IntRange(0), metavar="N", help="Exit status 1 if more than N messages remain."
    )
    return messages(seconds(command))


def show_lag(
    client: Client,
    positions: Mapping[str, Position],
    max_messages: int | None,
    max_seconds: float | None,
    *,
    as_json: bool,
) -> int:
    """Print the lag of these positions: how far each position is behind the end of its topic. `positions` are by topic.
    Return the exit status. Raises the errors of `lag_after`."""
    lags = run(partial(lags_after, client.on_loop, positions))
    whole = total(lags.values())
    if as_json:
        topics = [{"topic": topic, "position": str(positions[topic])} | _json(lag) for topic, lag in lags.items()]
        print_json(_json(whole) | {"topics": topics})
    else:
        rows = [(topic, positions[topic].index, lag.messages, _rounded(lag)) for topic, lag in lags.items()]
        print_table(("TOPIC", "INDEX", "LAG", "SECONDS"), rows)
    is_late = max_seconds is not None and (whole.seconds is None or whole.seconds > max_seconds)
    is_far = max_messages is not None and whole.messages > max_messages
    return FAILED if is_late or is_far else 0


def _json(lag: Lag) -> dict[str, object]:
    seconds = lag.seconds
    return {"messages": lag.messages, "seconds": None if seconds is None else round(seconds, 3)}


def _rounded(lag: Lag) -> int | None:
    seconds = lag.seconds
    return None if seconds is None else int(seconds)
