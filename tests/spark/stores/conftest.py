from tests.spark.postgres import postgres_url as postgres_url
