"""The places where reader jobs keep their output and their positions.

Begin with `contract`, the methods of every store; `urls` opens the store at a URL. `sql` is the store in an SQL
database, with its dialect for SQLite. Others are `postgresql` (rows by binary COPY) and `general` (MariaDB, MySQL and
all that SQLAlchemy supports). `delta` is a Delta table, and `delta_files` its files. `kinds` is the common part: types,
and errors that name a row.
"""
