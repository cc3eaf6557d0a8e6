from tests.services.mariadb import mariadb_url as mariadb_url
from tests.spark.postgres import postgres_url as postgres_url
