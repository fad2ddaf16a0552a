"""Who this process is: host, pid, and its place in a parallel job, from the launcher's environment."""

from __future__ import annotations

import os
import re
import socket

# Rank variables of common launchers: torchrun, Open MPI, MVAPICH, PMIx, MPICH and Intel MPI, and those of the
# schedulers HPE PALS, Flux, IBM JSM and Slurm, which come last: a launcher may run within their jobs.
_RANK = (
    "RANK",
    "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "PALS_RANKID",
    "FLUX_TASK_RANK",
    "JSM_NAMESPACE_RANK",
    "SLURM_PROCID",
)
_LOCAL_RANK = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PALS_LOCAL_RANKID",
    "FLUX_TASK_LOCAL_ID",
    "JSM_NAMESPACE_LOCAL_RANK",
    "SLURM_LOCALID",
)
_WORLD_SIZE = (
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "FLUX_JOB_SIZE",
    "JSM_NAMESPACE_SIZE",
    "SLURM_NTASKS",
)
_JOB = (
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "PMIX_NAMESPACE",
    "PMI_JOBID",
    "OMPI_MCA_orte_jobid",
    "FLUX_JOB_ID",
    "PALS_APID",
)


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
    """The variables that all processes of one launch share; empty without a launcher.

    A batch script of Slurm is none, though it has a rank: what it runs one after another shares its job id.
    Steps are told apart, but not where another launcher works within the job: its ranks on the first node have
    no step, the others have.
    """
    found = {name: os.environ[name] for name in _JOB if name in os.environ}
    if found.keys() == {"SLURM_JOB_ID"}:
        step = os.environ.get("SLURM_STEP_ID")
        return {**found, "SLURM_STEP_ID": step} if step else {}
    return found


def partition() -> str:
    """`<host>-<rank>-<pid>`, in characters that a folder name may have."""
    host = re.sub(r"[^A-Za-z0-9_.]", "_", socket.gethostname()) or "host"
    return f"{host}-{rank() or 0}-{os.getpid()}"
