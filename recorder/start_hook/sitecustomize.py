"""Runs at the start of every Python process of a recorded job: arms the recorder, then steps out of the way.

`nanalyze record` puts this folder first in PYTHONPATH, so `site` finds this file as `sitecustomize`.
sys.path is then made what it would have been, and the job's own sitecustomize, if it has one, is
imported in this one's place. Any interpreter may read this, without nanalyze and of any age: hence
the old-fashioned syntax, and nothing in here may raise.
"""

import os
import sys

if __name__ == "sitecustomize":
    _folder = os.path.dirname(__file__)
    _hook = None
    _request = os.environ.get("NANALYZE_RECORD", "")
    if sys.version_info >= (3, 11) and _request:
        try:
            _hook = __import__("nanalyze_start_hook")
        except Exception:  # a damaged installation is not the job's trouble
            _hook = None
    elif os.environ.get("NANALYZE_RECORD_PID") == str(os.getpid()) and '"quiet": true' not in _request:
        __import__("atexit").register(
            sys.stderr.write,
            "nanalyze: nothing was recorded: this is Python "
            + ".".join(map(str, sys.version_info[:2]))
            + ", and recording needs 3.11 or newer\n",
        )
    sys.path[:] = [_entry for _entry in sys.path if _entry != _folder]
    sys.path_importer_cache.pop(_folder, None)
    _own = sys.modules.pop("sitecustomize")
    try:
        # Without one this raises what `site` expects then. An error inside the job's own passes through,
        # so `site` reports it as it would have.
        __import__("sitecustomize")
    finally:
        if _hook is not None:
            _hook.arm()
