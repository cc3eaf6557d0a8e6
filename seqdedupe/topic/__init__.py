"""One topic: who may publish, what is admitted, what was confirmed, and who reads it."""
