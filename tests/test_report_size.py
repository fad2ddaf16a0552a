"""A report stays small, whatever the run: many kernel classes, long and hostile names, many ranges and processes."""

from __future__ import annotations

from pathlib import Path
from trace import Trace

import nanalyze.analysis as na
from nanalyze.analysis import report

MOST_BYTES = 3_000_000
CLASSES = 5_000
PROCESSES = 60
STEP_NS = 20_000


def name(number: int) -> str:
    """A different name of some 4 kB for each number: templates, markup, controls, no space to break at."""
    text = f"<script>&\"'\x1b[31m\u202e{number}"
    return f"void ns::kernel_{number}<{text * 3}{'T<int, ' * 500}{'>' * 500}>(float*)"


def test_many_classes_with_long_names_make_a_small_page(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run")
    trace.device()
    for number in range(CLASSES):
        kernel = trace.kernel_class(name(number), grid=(1 + number % 300, 1, 1))
        for launch in range(2):
            at = (launch * CLASSES + number) * STEP_NS
            trace.kernel(kernel, at, 5_000 + number % 9_000, queued_ns=at - 2_000)
    for number in range(1_000):
        trace.range(name(number % 100), number * 5 * STEP_NS, (number + 1) * 5 * STEP_NS)
    for number in range(0, CLASSES, 100):
        trace.exact({"raw<b>metric</b>" * 40: 1.0}, kernel_class_id=number, correlation_id=number)
    for rank in range(PROCESSES):
        process = f"node{rank // 8}-{rank}-100"
        trace.process_row(process, command=f'["{name(rank)}"]')
        trace.device(process, device_id=rank % 8, uuid=f"GPU-{rank}", name=name(rank))
        trace.kernel(kernel, rank * STEP_NS, 9_000, process=process, device_id=rank % 8)
    trace.write()
    with na.open(trace.run_dir) as run:
        written = report.write(run, tmp_path / "out")
    page = written.page.read_bytes()
    assert len(page) < MOST_BYTES
    assert b"<script>&" not in page
    assert f"kernel_{CLASSES - 1}&lt;".encode() in page  # the longest
