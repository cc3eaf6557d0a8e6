"""Running a Spark command: what Spark raises is an error of one line too."""

import os
import sys
from collections.abc import Sequence

import click
from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from seqdedupe import command as commands
from seqdedupe.command import FAILED, told_files
from seqdedupe_spark.failures import first_line
from seqdedupe_spark.sidecar import url_of


def run_command(
    command: click.Command, name: str, *, arguments: Sequence[str] | None = None, failed: int = FAILED
) -> int:
    """As `seqdedupe.command.run_command`; what Spark raises is status `failed` too."""
    try:
        return commands.run_command(command, name, arguments=arguments, failed=failed)
    except Py4JJavaError as e:
        what = e.java_exception.toString()
    except (PySparkException, Py4JError) as e:
        what = str(e)
    as_json = commands.says_json(sys.argv[1:] if arguments is None else arguments)
    commands.say_foreign(name, "SPARK_ERROR", f"Spark: {first_line(what)}", as_json=as_json)
    return failed


FILE_OPTIONS = {
    "token_file": "authParams",
    "tls_ca_file": "tlsTrustCertsFilePath",
    "tls_certificate_file": "tlsCertificateFilePath",
    "tls_key_file": "tlsKeyFilePath",
}
"""The data source's options of the files that a sidecar is shown, by the names of a command's."""


def file_options() -> dict[str, str]:
    """Those for the files that the command at work was told."""
    return {
        FILE_OPTIONS[name]: url_of(path) if name == "token_file" else os.path.abspath(path)
        for name, path in told_files().items()
    }
