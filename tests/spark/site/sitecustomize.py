"""What Python does first where this folder is in PYTHONPATH: it forgets the archives of PySpark and Py4J.

Spark puts them before all else for its own Python processes, of which a query starts five and more. Nobody keeps the
bytecode of what is imported from an archive, so each of them compiled for half a second. What is installed is the same.
"""

import sys

sys.path[:] = [place for place in sys.path if not place.rpartition("/")[2].startswith(("pyspark", "py4j"))]
