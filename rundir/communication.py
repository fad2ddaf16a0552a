"""Which kernels communicate: regular expressions for their names, one list for recorder and analysis.

The analysis gives such kernels the verdict `communication`; the recorder never replays them.
"""

from __future__ import annotations

# Matched against the function's name without arguments; `nccl` covers RCCL, which kept the names.
COMMUNICATION_PATTERNS = (
    (r"\bnccl[A-Z_]", "NCCL and RCCL: ncclDevKernel_*, ncclKernel_*, ncclSymk*"),
    (r"\bmscclpp?|\bmsccl[A-Z_]", "MSCCL and MSCCL++"),
    (r"\bnvshmem|\brocshmem|\bnvshmemi?x?_", "NVSHMEM and rocSHMEM"),
    (r"(?i)all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", "symmetric-memory and custom collectives"),
    (r"(?i)cross_device_reduce", "vLLM's custom all-reduce"),
    (r"\bdeep_ep::", "DeepEP's dispatch and combine"),
)
