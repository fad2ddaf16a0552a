"""Values as JSON can hold them."""

from __future__ import annotations

import math
from typing import Any


def finite(value: Any) -> Any:
    """`value` with dicts and sequences copied, in which numbers that are not finite are None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
