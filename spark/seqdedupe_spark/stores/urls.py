"""The store that a URL names."""

from functools import partial
from pathlib import Path

from seqdedupe.errors import error
from seqdedupe_spark.stores.contract import StoreFactory
from seqdedupe_spark.stores.delta import DeltaStore
from seqdedupe_spark.stores.postgres import PostgresStore
from seqdedupe_spark.stores.sqlite import SqliteStore

_FORMS = (
    "sqlite:///file.db, sqlite:////folder/file.db, postgresql://user@host/database, delta:///folder/table "
    "or mysql+pymysql://user@host/database, with the name of the driver"
)


def from_url(url: str, *, create: bool = True) -> StoreFactory:
    """What opens the store of this URL; nothing is opened yet. With `create` off a SQLite file has to be there then.

    `sqlite:///file.db` (from the folder that the job is started in) or `sqlite:////folder/file.db`;
    `postgresql://user:password@host:port/database?…`, as libpq has it; `delta:///folder/table`, where the output
    table's name has to be `table`; and `database+driver://…` for all others, as SQLAlchemy has it. Raises
    ConfigurationError (INVALID_OPTION, UNSUPPORTED_STORE), which never quotes a password.
    """
    scheme, _, rest = url.partition("://")
    if scheme == "sqlite" and rest.startswith("/") and rest.strip("/"):
        return partial(SqliteStore, str(Path(rest[1:]).absolute()), create=create)
    if scheme == "delta" and rest.startswith("/") and rest.strip("/"):
        return partial(DeltaStore, str(Path(rest)))
    if scheme in ("postgresql", "postgres"):
        # Made here once, since it reads the URL; it connects when it is used.
        PostgresStore(url)
        return partial(PostgresStore, url)
    if "+" in scheme:
        # Only who uses it needs SQLAlchemy.
        from seqdedupe_spark.stores.sql import SqlStore

        SqlStore(url).close()
        return partial(SqlStore, url)
    raise error("INVALID_OPTION", f"the store's URL is none of {_FORMS}")
