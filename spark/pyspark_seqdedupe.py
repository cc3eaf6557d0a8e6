"""The module in which Spark finds the data source `seqdedupe`: it imports every module named `pyspark_*` that it
finds."""

from seqdedupe_spark.source import SeqdedupeDataSource


class DefaultSource(SeqdedupeDataSource):
    """The data source that Spark finds automatically, without a `register` call."""
