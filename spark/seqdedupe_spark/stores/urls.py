"""Open the store that a URL names."""

import re
from functools import partial
from pathlib import Path
from urllib.parse import parse_qsl

from seqdedupe.errors import error
from seqdedupe_spark.options import Given, flag
from seqdedupe_spark.stores.contract import StoreFactory
from seqdedupe_spark.stores.delta import DeltaStore
from seqdedupe_spark.stores.delta_files import SCHEME, is_table_url
from seqdedupe_spark.stores.general import GeneralStore
from seqdedupe_spark.stores.postgresql import PostgresStore
from seqdedupe_spark.stores.sql import SqliteStore

_ENCODED = re.compile(r"%[0-9A-Fa-f]{2}")

_FORMS = (
    "sqlite:///file.db, sqlite:////folder/file.db, postgresql://user@host/database, delta:///folder/table, "
    "delta+s3://bucket/folder/table or, with the name of a driver, mysql+pymysql://user@host/database"
)


def from_url(url: str, *, create: bool = True) -> StoreFactory:
    """Return a function that opens the store of this URL. This function itself does not open the store. Unless `create`
    is set, a SQLite file must exist when the store is opened.

    - `sqlite:///file.db` is relative to the folder in which the job is started. `sqlite:////folder/file.db` is
      absolute.
    - `postgresql://user:password@host:port/database?…` has the same form as for libpq.
    - `delta:///folder/table` or `delta+s3://bucket/folder/table`: the name of the output table must be `table`. The
      options are `?partitionBy=column,…&mergeSchema=true`.
    - `database+driver://…` is for all other databases, in the form of SQLAlchemy.

    Raises ConfigurationError (INVALID_OPTION, UNSUPPORTED_STORE). The error never shows a password.
    """
    scheme, _, rest = url.partition("://")
    if scheme == "sqlite" and rest.startswith("/") and rest.strip("/"):
        return partial(SqliteStore, str(Path(rest[1:]).absolute()), create=create)
    if scheme in ("delta", "delta+s3"):
        return _delta(scheme, *rest.partition("?")[::2])
    if scheme in ("postgresql", "postgres"):
        # The constructor checks the URL. The store connects only when it is used.
        PostgresStore(url)
        return partial(PostgresStore, url)
    if "+" in scheme:
        GeneralStore(url).close()
        return partial(GeneralStore, url)
    raise error("INVALID_OPTION", f"the store's URL is none of {_FORMS}")


def _delta(scheme: str, place: str, query: str) -> StoreFactory:
    said = parse_qsl(query, keep_blank_values=True)
    if len(dict(said)) < len(said):
        raise error("INVALID_OPTION", "an option occurs twice in the store's URL")
    given = Given(dict(said), ("partitionBy", "mergeSchema"))
    nothing: tuple[str, ...] = ()
    partition_by, merge_schema = given.take("partitionBy", _names, nothing), given.take("mergeSchema", flag, False)
    if scheme == "delta" and _ENCODED.search(place):
        what = (
            f"the folder {place[:200]} has a % with two digits in its name, which delta-rs reads as another character"
        )
        raise error("INVALID_OPTION", what, hint="Write the folder's real name in the URL, or rename the folder.")
    if scheme == "delta" and place.startswith("/") and place.strip("/"):
        uri = str(Path(place))
    elif scheme == "delta+s3" and is_table_url(SCHEME + place.removesuffix("/")):
        uri = SCHEME + place.removesuffix("/")
    else:
        raise error("INVALID_OPTION", f"the store's URL is none of {_FORMS}")
    return partial(DeltaStore, uri, partition_by=partition_by, merge_schema=merge_schema)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not all(names):
        raise ValueError("it should be names of columns, separated by commas")
    return names
