"""The sink: rows of a DataFrame into topics of deduplication IDs, each once."""
