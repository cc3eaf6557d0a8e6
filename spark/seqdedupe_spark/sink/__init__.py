"""The sink: rows of a DataFrame into topics of deduplication IDs, each once.

Begin with `task`: the work of a write's tasks, and the classes that Spark calls. `row_layout` has the meaning of the
columns and the ID of each row, and makes frames of the rows.
"""
