"""The sink: rows of a DataFrame into topics of deduplication IDs, each once.

Begin with `task`: what the tasks of a write do, and what Spark calls. `row_layout` says what the columns mean, by which
ID each row is known, and makes frames of them.
"""
