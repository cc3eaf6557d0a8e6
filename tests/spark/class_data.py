"""An archive of the classes that Spark's JVMs load: `python -m tests.spark.class_data` makes it, if it is missing.

To read and verify them is a third of what a driver costs, and the tests start dozens. Java takes from an archive what
fits its version and its class path, and loads all else as ever. But it trusts what an archive holds, and dies of one
that was cut short: so an archive has its name, with a checksum, once it is whole and on disk.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import pyspark

FOLDER = Path(sys.prefix) / "class-data"
TIMEOUT_SECONDS = 300.0

SESSION = """
import tempfile
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[2]").getOrCreate()
rows = spark.createDataFrame([(1, "a")], "id long, text string")
rows.mapInArrow(lambda batches: batches, rows.schema).collect()
with tempfile.TemporaryDirectory() as folder:
    rows.select("text").write.text(f"{folder}/in")
    stream = spark.readStream.schema("text string").text(f"{folder}/in").writeStream
    stream = stream.foreachBatch(lambda batch, _: batch.foreachPartition(list)).option("checkpointLocation", folder)
    stream.trigger(availableNow=True).start().awaitTermination()
spark.stop()
"""
"""A little of what the tests' jobs do."""


def options() -> str:
    """For a JVM: none without an archive for the Java and the Spark of this environment."""
    archive = next(FOLDER.glob(f"{_fits()}-*.jsa"), None)
    # Java is to say nothing about one that does not fit.
    return f' "-XX:SharedArchiveFile={archive}" -Xlog:disable' if archive else ""


def make() -> None:
    """Runs a session whose JVM writes the archive when it ends, unless there is a whole one."""
    for archive in FOLDER.glob(f"{_fits()}-*.jsa"):
        if archive.stem.endswith(_checksum(archive)):
            return
        archive.unlink(missing_ok=True)
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        written = Path(folder, "written")
        java = f'-XX:TieredStopAtLevel=1 -XX:+UseSerialGC "-XX:ArchiveClassesAtExit={written}"'
        spark = shlex.join(["--driver-java-options", java, "--conf", "spark.ui.enabled=false", "pyspark-shell"])
        environment = os.environ | {"PYSPARK_SUBMIT_ARGS": spark, "PYSPARK_PYTHON": sys.executable}
        # The JVM outlives its session, and has the same output: what is read until its end has the archive written.
        subprocess.run(
            [sys.executable, "-"],
            input=SESSION.encode(),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_SECONDS,
            check=True,
        )
        with written.open("rb") as file:
            os.fsync(file.fileno())
        written.rename(FOLDER / f"{_fits()}-{_checksum(written)}.jsa")


def _fits() -> str:
    """What an archive is for."""
    home = os.environ.get("JAVA_HOME")
    java = Path(home, "bin", "java") if home else Path(shutil.which("java") or "java")
    places = [place.resolve() for place in (java, Path(pyspark.__file__).parent / "jars") if place.exists()]
    of = [f"{place} {place.stat().st_mtime_ns}" for place in places]
    return f"{zlib.crc32(' '.join(of).encode()):08x}"


def _checksum(archive: Path) -> str:
    checksum = 0
    with archive.open("rb") as file:
        while chunk := file.read(1 << 20):
            checksum = zlib.crc32(chunk, checksum)
    return f"{checksum:08x}"


if __name__ == "__main__":
    try:
        make()
    except (OSError, subprocess.SubprocessError) as e:
        print(f"Spark's JVMs start without an archive of their classes: {e}")
