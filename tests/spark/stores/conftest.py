from tests.services.mariadb import mariadb_url as mariadb_url
from tests.spark.postgres import postgres_url as postgres_url
from tests.spark.s3 import between as between
from tests.spark.s3 import lake as lake
from tests.spark.s3 import s3 as s3
