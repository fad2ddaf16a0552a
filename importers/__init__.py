"""Turn other tools' traces into run directories: Nsight Compute, Nsight Systems, Kineto, Proton.

Each module reads one kind: `detect(path, head)` says whether a file is of that kind by its
content, `read(paths, sink, options)` feeds the tables. `registry` lists them; `sink` writes.
"""
