"""The Spark session of a command: its start, and errors as one line, including errors of workers."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from seqdedupe.errors import REASONS, error
from seqdedupe_spark.source import SeqdedupeDataSource

if TYPE_CHECKING:
    import click

# -- Errors that cross Spark: the error of a worker, raised again on the driver.

_TYPED_ERROR = re.compile(r"seqdedupe\.errors\.\w+: (.*) \[([A-Z_]+)\]")


@contextmanager
def typed_failures() -> Iterator[None]:
    """Raise the `SeqdedupeError` that caused a task to fail. Spark returns this error only as the text of a
    traceback."""
    try:
        yield
    except PySparkException as e:
        found = _TYPED_ERROR.search(str(e))
        if found is None or found[2] not in REASONS:
            raise
        raise error(found[2], found[1]) from e


def first_line(text: str) -> str:
    """Return the first line of Spark's error text. A plan or a traceback may follow the line, and a line break may
    precede it."""
    return text.strip().partition("\n")[0]


LEAST_JAVA = 17
"""The oldest Java on which Spark runs."""

DEFAULT_MASTER = "local[*,4]"
"""All cores of this machine, and the same number of tries of a task as on a cluster."""

_SOURCE_FOLDER = str(Path(__file__).absolute().parents[1])
"""The folder of `pyspark_seqdedupe`. Spark looks for data sources only in the folders of the path, and an editable
install is none."""

_LOGGING = Path(__file__).with_name("log4j2.properties").absolute()

_GATEWAY = "PYSPARK_GATEWAY_PORT"
"""Set by spark-submit: there is a JVM, and it knows its master."""

_REMOTE = "SPARK_REMOTE"
"""Set for Spark Connect: the JVM is elsewhere."""

_JAVA_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


def start_session(name: str, master: str | None = None) -> SparkSession:
    """Return the session of spark-submit or of Spark Connect if such a session exists. Otherwise start a new session on
    `master`.

    Raises INVALID_CONFIGURATION, before the session is started, if Java is missing. Workers on this machine can import
    modules of the current directory, and find the data source.
    """
    if not (_GATEWAY in os.environ or _REMOTE in os.environ):
        check_java()
        master = master or DEFAULT_MASTER
        if "SPARK_CONF_DIR" not in os.environ:
            os.environ.setdefault("SPARK_SUBMIT_OPTS", f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ["PYTHONPATH"] = workers_path(os.getcwd())
    builder = SparkSession.builder.appName(name)
    if _REMOTE not in os.environ:
        builder = builder.config("spark.ui.showConsoleProgress", "false")
    session = (builder.master(master) if master else builder).getOrCreate()
    activate(session)
    return session


def register(spark: SparkSession) -> None:
    """Register the data source `seqdedupe` with a session, so that Spark need not search for it.

    Spark reads with separate Python processes. On a local master, these processes run the Python of this program,
    unless `PYSPARK_PYTHON` or `spark.pyspark.python` names another Python. On other masters, they run the `python3` of
    the `PATH`. Over Spark Connect, the server selects the Python. Raises INVALID_CONFIGURATION if that Python, on the
    driver, does not have this package.
    """
    if isinstance(spark, SparkSession):
        context = spark.sparkContext
        is_chosen = "PYSPARK_PYTHON" in os.environ or context.getConf().contains("spark.pyspark.python")
        if not is_chosen and str(context.master).startswith("local"):
            context.pythonExec = sys.executable
        _check_has_this_package(context)
    spark.dataSource.register(SeqdedupeDataSource)


def _check_has_this_package(context: SparkContext) -> None:
    python = context.pythonExec
    if python == sys.executable:
        return
    path = [*(context._python_includes or ()), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        done = subprocess.run(
            [python, "-c", "import seqdedupe_spark"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode == 0:
            return
        said = done.stderr.strip().rpartition("\n")[2]
    except OSError as e:
        said = str(e)
    raise error(
        "INVALID_CONFIGURATION",
        f"Spark starts {python!r} for its Python processes, which cannot import seqdedupe_spark: {said}",
        hint="Set PYSPARK_PYTHON to a Python that has seqdedupe[spark], before the session is created. On this machine "
        f"{sys.executable} has it.",
    )


def activate(spark: SparkSession) -> None:
    """Make the session the active session of this thread. Spark finds the data sources to write to in the active
    session.

    A Python thread has a JVM thread, and the active session belongs to the JVM thread. Without an active session,
    `save()` and `start()` with the format `seqdedupe` end with DATA_SOURCE_NOT_FOUND. Over Spark Connect this function
    does nothing.
    """
    if isinstance(spark, SparkSession):
        spark._jvm.SparkSession.setActiveSession(spark._jsparkSession)  # type: ignore[union-attr]


def workers_path(*folders: str | Path) -> str:
    """Return the PYTHONPATH for Spark's own Python processes: these folders, the data source's, and the present
    value."""
    return os.pathsep.join([*map(str, folders), _SOURCE_FOLDER, *filter(None, [os.environ.get("PYTHONPATH")])])


def check_java() -> None:
    """Raise INVALID_CONFIGURATION, which names the package to install, unless a Java version on which Spark runs is
    installed."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    try:
        said = subprocess.run([java or "java", "-version"], capture_output=True, text=True, check=False).stderr
    except OSError:
        said = ""
    found = _JAVA_VERSION.search(said)
    if found is None or int(found[1]) < LEAST_JAVA:
        what = f"Java {found[1]} is too old" if found else "there is no Java"
        raise error(
            "INVALID_CONFIGURATION",
            f"Spark needs Java {LEAST_JAVA} or newer, and {what}",
            hint=f"Install it: apt install openjdk-{LEAST_JAVA}-jre-headless",
        )


# -- Running a Spark command: an exception of Spark is an error of one line, too.


def run_command(
    command: "click.Command", name: str, *, arguments: Sequence[str] | None = None, failed: int | None = None
) -> int:
    """Do the same as `seqdedupe.command.run_command`. An exception of Spark has the status `failed`, by default
    FAILED."""
    # Only commands need click, and tasks have errors that cross Spark too.
    from seqdedupe import command as commands

    failed = commands.FAILED if failed is None else failed
    try:
        return commands.run_command(command, name, arguments=arguments, failed=failed)
    except Py4JJavaError as e:
        what = e.java_exception.toString()
    except (PySparkException, Py4JError) as e:
        what = str(e)
    as_json = commands.says_json(sys.argv[1:] if arguments is None else arguments)
    commands.say_foreign(name, "SPARK_ERROR", f"Spark: {first_line(what)}", as_json=as_json)
    return failed
