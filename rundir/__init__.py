"""The run directory: the one contract between the recorder and the analysis.

`schema` declares every table and column, `shards` writes and lists the Parquet files,
`runfile` reads and writes `run.json`, `counters` names the hardware counters. Neither a GPU
nor DuckDB is needed here; pyarrow is imported only when a file is touched.
"""
