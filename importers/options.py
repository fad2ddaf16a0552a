"""What a user may choose about an import, and the error that ends one."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from nanalyze.rundir.errors import NanalyzeError

LONGEST_REASON = 1000  # characters
LOCALES = ("en", "de")  # how numbers are written: 1,234.5 and 1.234,5


class ImportFailed(NanalyzeError):
    """A file that cannot be imported: what is wrong with it, and what to do about it.

    Libraries quote what they could not read in their reasons, so these are brought onto one line.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str, remedy: str) -> None:
        reason = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(reason.split()))[:LONGEST_REASON]
        super().__init__(f"{os.fspath(path)}: {reason.rstrip('.')}. {remedy}".rstrip())
        self.path = Path(path)
        self.reason = reason
        self.remedy = remedy


@dataclass(frozen=True)
class Limits:
    """What a damaged or hostile file may cost.

    A compressed file is refused when it unpacks to more than `unpacked_ratio` times its size and
    more than `unpacked_free_bytes` (traces compress 10 to 40 times, gzip's most is 1030), or to
    more than `unpacked_bytes` in any case. JSON nested deeper than `nesting` is refused.
    """

    unpacked_bytes: int = 64 * 2**30
    unpacked_ratio: int = 200
    unpacked_free_bytes: int = 256 * 2**20
    nesting: int = 99
    launches: int = 200_000_000  # that one number in a file may stand for (aggregated profiles)
    text_bytes: int = 256 * 2**20  # of a file that must be held in memory as a whole: objects take 20 times as much


@dataclass(frozen=True)
class Options:
    """`kind`: the importer to use instead of the one that recognises the file. `locale`: how the
    file writes numbers, where that is in doubt. `device`: only what ran on the device of this id
    or UUID. `align`: bring the clocks of several ranks together.
    """

    kind: str | None = None
    locale: str | None = None
    device: str | None = None
    align: bool = True
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.locale is not None and self.locale not in LOCALES:
            raise NanalyzeError(f"--locale {self.locale}: is not known. Choose one of {', '.join(LOCALES)}.")
