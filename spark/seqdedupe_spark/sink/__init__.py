"""The sink: it writes rows of a DataFrame to topics of deduplication IDs, each row once.

Begin with `task`, which contains the work of a write's tasks and the classes that Spark calls. `row_layout` defines the
meaning of the columns and the ID of each row, and makes frames of the rows.
"""
