"""The place of the Spark reader jobs, which are still to come."""
