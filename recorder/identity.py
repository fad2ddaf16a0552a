"""Who this process is: host, pid, and its place in a parallel job, from the launcher's environment."""

from __future__ import annotations

import os
import re
import socket

# Rank variables of common launchers: torchrun, Open MPI, PMIx, MPICH and Intel MPI, Slurm.
_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
_WORLD_SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_JOB = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PMIX_NAMESPACE", "PMI_JOBID", "OMPI_MCA_orte_jobid")


def from_environment(names: tuple[str, ...]) -> int | None:
    values = (os.environ.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdecimal()), None)


def rank() -> int | None:
    """The global rank, where a launcher tells it."""
    return from_environment(_RANK)


def local_rank() -> int | None:
    return from_environment(_LOCAL_RANK)


def world_size() -> int | None:
    return from_environment(_WORLD_SIZE)


def job() -> dict[str, str]:
    """The variables that all processes of one launch share; empty without a launcher."""
    return {name: os.environ[name] for name in _JOB if name in os.environ}


def partition() -> str:
    """`<host>-<rank>-<pid>`, in characters that a folder name may have."""
    host = re.sub(r"[^A-Za-z0-9_.]", "_", socket.gethostname()) or "host"
    return f"{host}-{rank() or 0}-{os.getpid()}"
