"""Where reader jobs keep their output and their positions.

Begin with `contract`, which says what every store does; `urls` opens the one that a URL names. `sql` is the store in an
SQL database and its dialect for SQLite; others are `postgresql` (rows by binary COPY) and `general` (MariaDB, MySQL and
all that SQLAlchemy speaks). `delta` is a Delta table, and `delta_files` where it lies. `kinds` is what all of them
share: types, and errors that name a row.
"""
