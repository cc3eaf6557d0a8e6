"""The stores, in which reader jobs keep their output and their positions.

Begin with `contract`, the methods of every store and their common part; `urls` opens the store at a URL. `sql` is the
store in an SQL database, including the dialect for SQLite. Other dialects are `postgresql` (inserts rows by binary
COPY) and `general` (MariaDB, MySQL and every other database that SQLAlchemy supports). `delta` is a Delta table, and
`delta_files` handles its files.
"""
