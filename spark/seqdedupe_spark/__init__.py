"""Spark over a sidecar's topics: a data source, a reader job that keeps its position with its output, an audit."""
