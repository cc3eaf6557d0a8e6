"""Check the models of the protocol with Spin: every promise holds, and no rule can be omitted.

    python -m model.check [--write | --large] [NAME ...]

Without an option, the small bounds: each scene without a bug, and each planted bug, which must break a promise. Then
docs/internals/model.md must contain what was found; `--write` writes this into the page. `--large` checks the large
bounds, which need minutes and gigabytes. NAME selects scenes and bugs, and prints the traces of these bugs.

Needs `spin` and `gcc`. The exit status is 0 if everything is as expected, otherwise 1.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "docs" / "internals" / "model.md"
MEMORY_IN_MB = 8_000
MAX_DEPTH = 1_000_000
WORKERS = 2
PARTS = ("RETENTION", "FORGETTING", "LIVENESS", "READERS", "RESTORES")
"""Defines that switch on a part of a model, and are no bounds."""
MIN_LARGE_STATES = 10_000_000


@dataclass(frozen=True, slots=True)
class Scene:
    """A part of a model, and the bounds within which all its states are explored. The file has the default bounds."""

    name: str
    small: Mapping[str, int]
    large: Mapping[str, int] | None
    file: str = "producer.pml"
    max_trace: int = 100
    """The number of Spin's steps within which a bug must break a promise, including the processes' starts."""

    @property
    def is_about_liveness(self) -> bool:
        """Whether the scene asks if something happens at last, if every process takes its steps at last."""
        return "LIVENESS" in self.small


POSITIONS = {
    "RESTORES": 1,
    "READERS": 1,
    "NAMES": 2,
    "SESSIONS": 2,
    "MESSAGES": 1,
    "TERMS": 2,
    "FLIGHT": 1,
    "LOSSES": 0,
}

SCENES = (
    Scene(
        "pipelining",
        {"MESSAGES": 3, "TERMS": 3, "LOG": 8},
        {"MESSAGES": 3, "TERMS": 4, "LOG": 11, "CRASHES": 2, "LOSSES": 2, "FLIGHT": 3},
    ),
    Scene(
        "two owners",
        {"MESSAGES": 2, "SIDECARS": 2, "TERMS": 3, "LOG": 7},
        {"MESSAGES": 2, "SIDECARS": 2, "TERMS": 3, "LOG": 9},
    ),
    Scene(
        "two sessions",
        {"SESSIONS": 2, "MESSAGES": 1, "SIDECARS": 2, "TERMS": 2, "LOG": 7},
        {"SESSIONS": 2, "MESSAGES": 2, "SIDECARS": 2, "TERMS": 2, "LOG": 8},
    ),
    Scene(
        "two names",
        {"NAMES": 2, "SESSIONS": 2, "MESSAGES": 1, "TERMS": 3, "LOG": 8},
        {"NAMES": 2, "SESSIONS": 2, "MESSAGES": 2, "TERMS": 3, "LOG": 9},
    ),
    Scene(
        "retention",
        {"RETENTION": 1, "MESSAGES": 2, "TERMS": 2, "LOG": 8, "LOSSES": 0},
        {"RETENTION": 1, "MESSAGES": 3, "TERMS": 3, "LOG": 9},
    ),
    Scene(
        "forgetting",
        {"FORGETTING": 1, "SESSIONS": 2, "MESSAGES": 1, "TERMS": 2, "LOG": 8},
        {"FORGETTING": 1, "SESSIONS": 2, "MESSAGES": 1, "SIDECARS": 2, "TERMS": 2, "LOG": 9},
    ),
    Scene(
        "readers",
        {"READERS": 1, "MESSAGES": 2, "SIDECARS": 2, "TERMS": 2, "LOG": 7},
        {"READERS": 1, "MESSAGES": 2, "SIDECARS": 2, "TERMS": 3, "LOG": 8},
    ),
    Scene(
        "restored log",
        {"RESTORES": 1, "SESSIONS": 2, "MESSAGES": 1, "TERMS": 2, "LOG": 6},
        {"RESTORES": 1, "SESSIONS": 2, "MESSAGES": 2, "TERMS": 2, "LOG": 7},
    ),
    Scene(
        "restored positions",
        {**POSITIONS, "LOG": 5, "CRASHES": 0},
        {**POSITIONS, "LOG": 6, "CRASHES": 1},
    ),
    Scene("window", {"IDS": 3, "LOG": 5}, {"IDS": 3, "LOG": 6}, "window.pml", max_trace=45),
    Scene("receipts", {"LIVENESS": 1, "MESSAGES": 2, "SIDECARS": 2, "TERMS": 5, "LOG": 15}, None),
)


@dataclass(frozen=True, slots=True)
class Bug:
    """A rule that a model can omit, and the scene in which a promise breaks without it."""

    name: str
    scene: str
    rule: str


BUGS = (
    Bug("NO_LINK", "pipelining", "A message is admitted only after its predecessor."),
    Bug("LINK_IS_THE_ID_SENT_BEFORE", "pipelining", "The link is the highest lower ID sent, not the last ID sent."),
    Bug("IN_FLIGHT_COUNTS_AS_STORED", "pipelining", "A copy of a message in flight is not Dup."),
    Bug("IN_FLIGHT_COUNTS_AS_NEW", "pipelining", "A copy of a message in flight is not NotDup."),
    Bug("PUSHED_AFTER_THE_WRITE", "pipelining", "An ID is pushed before the write."),
    Bug("RECEIPT_BEFORE_CONFIRMATION", "pipelining", "A receipt follows the confirmation."),
    Bug("FAILS_WITHOUT_READING", "pipelining", "After an unknown outcome, the sidecar reads the log."),
    Bug("SETTLES_WITHOUT_A_NEW_MARKER", "pipelining", "Settling begins with a marker of a new term."),
    Bug("LOG_GOES_ON_AFTER_A_LOSS", "pipelining", "After a lost append, the log refuses later appends."),
    Bug("SNAPSHOT_OF_PUSHED", "pipelining", "A snapshot contains persisted IDs, not pushed IDs."),
    Bug("SNAPSHOT_AT_THE_LOGS_END", "pipelining", "A snapshot's position is that of the last confirmed entry."),
    Bug("SNAPSHOT_IN_TWO_WRITES", "pipelining", "A snapshot and its position are one atomic write."),
    Bug("SERVES_BEFORE_READING", "two owners", "No verdict before the log was read up to the own marker."),
    Bug("READS_BEFORE_ITS_MARKER", "two owners", "The marker is written before the log is read."),
    Bug("VOID_ENTRIES_COUNT", "two owners", "Entries that are not under the owner's marker are void."),
    Bug("VOID_ENTRIES_HAVE_AN_INDEX", "two owners", "Void entries have no index."),
    Bug("MARKER_WITHOUT_A_HIGHER_TERM", "two owners", "Only a marker with a higher term takes ownership."),
    Bug("CONFIRMS_WITHOUT_READING_A_GAP", "two owners", "An append after another owner's marker is not confirmed."),
    Bug("NO_EPOCH_CHECK", "two sessions", "Only the newest session may publish."),
    Bug("OPEN_ANSWERED_AT_ONCE", "two sessions", "Open answers when its record is durable."),
    Bug("SESSION_WITHOUT_RECORD", "two sessions", "Sessions are in the log."),
    Bug("REPLAY_WITHOUT_MAXIMUM", "retention", "Replay merges by maximum."),
    Bug("RETENTION_WITHOUT_STATEMENTS", "retention", "Retention first repeats what is in force."),
    Bug("RETENTION_AHEAD_OF_THE_SNAPSHOT", "retention", "Retention drops only what the snapshot covers."),
    Bug("FORGETS_A_CONNECTED_NAME", "forgetting", "A connected name is not forgotten."),
    Bug("FORGOTTEN_NAME_KEEPS_ITS_SESSION", "forgetting", "Forgetting a name ends its session."),
    Bug("SHOWS_WHAT_IS_NOT_CONFIRMED", "readers", "Readers get only confirmed messages."),
    Bug("ANY_SIDECAR_SAYS_WHERE_THE_TOPIC_ENDS", "readers", "Only an owner says where the topic ends."),
    Bug("REFUSES_BEFORE_APPENDS_SETTLE", "readers", "An owner refuses a position when its appends have settled."),
    Bug("REFUSES_WITHOUT_PROOF", "readers", "An owner refuses a position when a new append has settled."),
    Bug("RESUMES_BELOW_ITS_RECEIPTS", "restored log", "A client that resumes compares persisted with its receipts."),
    Bug("EPOCHS_REPEAT", "restored log", "The count of a term's sessions begins with a random number."),
    Bug("SNAPSHOT_AFTER_THE_LOGS_END", "restored log", "A log that ends before the snapshot is damaged."),
    Bug("POSITION_WITHOUT_OWNERSHIP", "restored positions", "A position names its message's ownership."),
    Bug("OWNERSHIP_IS_THE_TERM", "restored positions", "Ownership is a marker's random token, not its term."),
    Bug("ID_IN_FLIGHT_COUNTS_AS_NEW", "window", "An ID in flight is not NotDup."),
    Bug("ID_IN_FLIGHT_COUNTS_AS_STORED", "window", "An ID in flight is not Dup."),
    Bug("FAILED_ID_COUNTS_AS_STORED", "window", "The window does not contain IDs of failed appends."),
    Bug("SWEEP_REMOVES_NEWER_COPIES", "window", "Forgetting a message keeps an ID that was accepted again."),
    Bug("LOOKUP_IN_OTHER_RUNS", "window", "A decision uses the runs of its lookup, or repeats the lookup."),
    Bug("RUN_REPLACES_CHUNKS_AT_ONCE", "window", "A run counts when a snapshot names the run."),
    Bug("WINDOW_STORED_IN_TWO_WRITES", "window", "The window and its position are one atomic write."),
    Bug("WINDOW_WITHOUT_REPLAY", "window", "Recovery reads the log after the snapshot's position."),
    Bug("FAILED_APPEND_STAYS_PUSHED", "receipts", "A failed append does not stay pushed."),
    Bug("UNKNOWN_OUTCOMES_STAY", "receipts", "The sidecar settles unknown outcomes."),
)


@dataclass(frozen=True, slots=True)
class Result:
    """What Spin found: the number of distinct states, the broken promise (empty: all hold), and the way there."""

    states: int
    broken: str
    trace: tuple[str, ...]


class IncompleteError(Exception):
    """Spin did not explore everything: a mistake in the model, or a limit of memory or depth."""


def _call(folder: str, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise IncompleteError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def run(scene: Scene, bounds: Mapping[str, int], bug: str = "") -> Result:
    """Explore all states of a scene within these bounds. With a bug, search for a shortest way to a broken promise.

    Raises IncompleteError.
    """
    defines = [f"-D{name}={value}" for name, value in bounds.items()] + [f"-DBUG_{bug}"] * bool(bug)
    is_shortest = bool(bug) and not scene.is_about_liveness
    with tempfile.TemporaryDirectory() as folder:
        for file in FOLDER.glob("*.pml"):
            Path(folder, file.name).write_bytes(file.read_bytes())
        _call(folder, "spin", *defines, "-a", scene.file)
        flags = ["-DNFAIR=3"] if scene.is_about_liveness else ["-DSAFETY", "-DREACH"] if is_shortest else ["-DSAFETY"]
        flags += ["-DCOLLAPSE", f"-DMEMLIM={MEMORY_IN_MB}"]
        _call(folder, "gcc", "-O1", "-w", *flags, "-o", "pan", "pan.c")
        # A log that is full ends a run. That is no deadlock (-E).
        options = ["-a", "-f"] if scene.is_about_liveness else ["-E", "-i"] if is_shortest else ["-E"]
        report = _call(folder, "./pan", f"-m{scene.max_trace if is_shortest else MAX_DEPTH}", *options)
        states = re.search(r"^ *(\d+) states, stored", report, re.MULTILINE)
        errors = re.search(r"errors: (\d+)$", report, re.MULTILINE)
        is_cut = "max search depth too small" in report and not is_shortest
        if states is None or errors is None or is_cut or "out of memory" in report:
            raise IncompleteError(report)
        if errors[1] == "0":
            return Result(int(states[1]), "", ())
        output = _call(folder, "spin", *defines, "-T", "-t", scene.file)
    # In the model of owners, the first step is the first owner's marker.
    steps = [line for line in output.splitlines() if re.fullmatch(r"[\w.]+(\(\S*\))?(:void)?|BROKEN.*", line)]
    steps = steps[scene.file == "producer.pml" :]
    ending = next((k for k, step in enumerate(steps) if step.startswith("BROKEN")), None)
    if ending is None:
        return Result(int(states[1]), "liveness: a message never gets a receipt", tuple(steps))
    return Result(int(states[1]), steps[ending].removeprefix("BROKEN: "), tuple(steps[:ending]))


# -- The page: three parts of it are what was found.

Results = Mapping[tuple[str, str], Result]
"""By scene and bug; without a bug, the bug is empty."""


def scenes_table(results: Results, *, large: bool) -> str:
    """Return the table of all scenes without a bug."""
    rows = ["| scene | bounds | states |", "|---|---|---:|"]
    for scene in SCENES:
        bounds = scene.large if large else scene.small
        if bounds is not None:
            shown = " ".join(f"{name}={value}" for name, value in bounds.items() if name not in PARTS)
            rows.append(f"| {scene.name} | {shown} | {results[scene.name, ''].states:,} |")
    return "\n".join(rows)


def rules_text(results: Results) -> str:
    """Return each rule with the shortest trace without it, and the promise that then breaks."""
    lines = ["```text"]
    for scene in SCENES:
        lines += [f"{scene.name}:"] * any(bug.scene == scene.name for bug in BUGS)
        for bug in BUGS:
            if bug.scene == scene.name:
                result = results[scene.name, bug.name]
                promise = result.broken.partition(":")[0].replace(" ", "-")
                lines += [f"  {bug.rule}", f"    {_short(scene, result)} →{promise}"]
    return "\n".join([*lines, "```"])


_ADDED = r"([AB]\.|)admit\(((\d)(?:,s\d)?)\) \1land\(\3(?:,index\d)?\)(?!:void)"
_OPENED = (
    r"([AB]\.)open\((s\d),(epoch\d+)\) (\1store\S+ |)\1land\(SESSION,\d+\) (\1store\S+ |)"
    r"\1confirm\(SESSION,\d+\) \1opened\(\2,\d\)"
)
_TAKEN = r"([AB]\.)mark\((\d)\) \1serve\((\d)\)"
"""Steps that the page shows as one."""


def _short(scene: Scene, result: Result) -> str:
    steps = [step for step in result.trace if not (scene.is_about_liveness and re.search("answer|refuse", step))]
    # A lookup is shown where other steps follow, before the decision.
    text = re.sub(r"lookUp\((\d)\) (?=(admit|answer)\(\1)", "", " ".join(steps)).replace("MESSAGE,", "")
    text = re.sub(_OPENED, r"\4\5\1opened(\2,\3)", re.sub(_ADDED, r"\1add(\2)", text))
    text = re.sub(_TAKEN, r"\1take(\2,\3)", text)
    if scene.small.get("SIDECARS", 1) == 1:
        text = text.replace("A.", "")
    return text.replace(",s1", "") if scene.small.get("SESSIONS", 1) == 1 else text


def with_part(page: str, part: str, content: str) -> str:
    """Return the page with this content in a part, which is between two comments."""
    before, begin, rest = page.partition(f"<!-- {part}: written by model/check.py -->\n")
    if not begin:
        raise ValueError(f"{PAGE.name} has no part {part!r}")
    return f"{before}{begin}\n{content}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write what was found into the page")
    parser.add_argument("--large", action="store_true", help="check the large bounds")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a scene or a bug")
    options = parser.parse_args(arguments)
    scenes = {scene.name: scene for scene in SCENES}
    jobs: list[tuple[Scene, Mapping[str, int], str]] = []
    if options.large:
        jobs += [(scene, scene.large, "") for scene in SCENES if scene.large is not None]
    else:
        jobs += [(scene, scene.small, "") for scene in SCENES]
        jobs += [(scenes[bug.scene], scenes[bug.scene].small, bug.name) for bug in BUGS]
    if options.names:
        jobs = [job for job in jobs if job[0].name in options.names or job[2] in options.names]
    results: dict[tuple[str, str], Result] = {}
    wrong: list[str] = []

    def check(job: tuple[Scene, Mapping[str, int], str]) -> None:
        scene, _, bug = job
        result = results[scene.name, bug] = run(*job)
        print(f"{scene.name}, {bug or 'no bug'}: {result.states:,} states, {result.broken or 'all promises hold'}")
        if options.names or (result.broken and not bug):
            print("".join(f"    {step}\n" for step in result.trace), end="")
        if bool(bug) != bool(result.broken):
            wrong.append(f"{bug} breaks nothing" if bug else f"{scene.name}: {result.broken}")

    # Large runs need the memory of the machine, one after the other.
    with ThreadPoolExecutor(1 if options.large else WORKERS) as pool:
        list(pool.map(check, jobs))
    if options.large:
        states = sum(result.states for result in results.values())
        print(f"{states:,} states")
        if not options.names and states < MIN_LARGE_STATES:
            wrong.append(f"the large bounds have only {states:,} states")
    if not options.names:
        wrong += _page(results, large=options.large, write=options.write)
    print("\n".join(wrong), file=sys.stderr, end="\n" * bool(wrong))
    return 1 if wrong else 0


def _page(results: Results, *, large: bool, write: bool) -> list[str]:
    """Compare the page with the results, or write them into the page. Return what is wrong."""
    page = PAGE.read_text()
    expected = with_part(page, "large" if large else "small", scenes_table(results, large=large))
    if not large:
        expected = with_part(expected, "rules", rules_text(results))
    if write:
        PAGE.write_text(expected)
    elif expected != page:
        return [f"{PAGE.name} differs from what was found: run the command again with --write"]
    return []


if __name__ == "__main__":
    sys.exit(main())
