"""Engines other than DuckDB that answer the same SQL over the same run directories.

`translate` carries DuckDB's SQL over to Spark's and needs no Spark; `location` says where a run lies and
what a catalog of it is; `session` starts Spark; `spark` is a `Run` whose large tables stay there.
docs/spark.md describes them for users.
"""
