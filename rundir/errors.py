"""The errors a user can meet. Each message names the object and what to do about it."""

from __future__ import annotations


class NanalyzeError(Exception):
    """Base of every error that is the user's to solve: shown as one line, without a traceback."""

    exit_code = 1


class RunError(NanalyzeError):
    """A run directory that cannot be read or written."""


class FormatVersionError(RunError):
    """A run or shard written by a format version this installation does not know."""


class QueryError(NanalyzeError):
    """SQL that cannot be run: wrong, not a SELECT, or not permitted."""


class RecorderError(NanalyzeError):
    """The recorder cannot start; the job it was to record is not affected."""
