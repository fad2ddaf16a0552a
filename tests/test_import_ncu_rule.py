"""Verdicts of imported launches equal those of Nsight Compute's rule, applied here to the file itself."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from ncu_files import COMPUTE, MEMORY, REAL_TRACES, Kernel, details, needs_real_traces, sol

import nanalyze.analysis as na
from nanalyze.importers import registry

Launch = tuple[str, float, float]  # kernel, compute and memory in % of the peak

LABELS = {"Compute (SM) Throughput": COMPUTE, "Memory Throughput": MEMORY}


def rule(compute: float, memory: float) -> str:
    """SpeedOfLight.py: 80 % is high, 60 % is low, 10 points are a lead."""
    if max(compute, memory) >= 80:
        return "memory" if memory > compute else "compute"
    if max(compute, memory) < 60:
        return "latency"
    if abs(compute - memory) < 10:
        return "balanced"
    return "memory" if memory > compute else "compute"


def verdicts(run_dir: Path) -> dict[str, tuple[str, str]]:
    with na.open(run_dir) as run:
        rows = run.arrow("SELECT kernel, bound, reason FROM verdicts").to_pylist()
    assert len(rows) == len({row["kernel"] for row in rows})
    return {row["kernel"]: (row["bound"], row["reason"]) for row in rows}


def imported(tmp_path: Path, launches: list[Launch]) -> dict[str, tuple[str, str]]:
    path = tmp_path / "metrics.csv"
    kernels = [Kernel(i, name, sol(compute, memory)) for i, (name, compute, memory) in enumerate(launches)]
    path.write_text("\n".join(details(kernels)))
    registry.import_files([path], tmp_path / "run")
    return verdicts(tmp_path / "run")


def agreed(launches: list[Launch]) -> dict[str, str | None]:
    """What the rule says of every launch of a kernel, None where it says different things."""
    said: dict[str, set[str]] = {}
    for name, compute, memory in launches:
        said.setdefault(name, set()).add(rule(compute, memory))
    return {name: next(iter(labels)) if len(labels) == 1 else None for name, labels in said.items()}


# --- files made here --------------------------------------------------------------------------


def test_verdicts_equal_the_rule_wherever_it_says_one_thing(tmp_path: Path) -> None:
    """Of kernels launched once to four times, near to and far from the thresholds."""
    chance = random.Random(6)
    launches: list[Launch] = []
    for number in range(300):
        compute, memory = chance.uniform(0, 100), chance.uniform(0, 100)
        for _ in range(chance.randint(1, 4)):
            spread = chance.choice((0.0, 0.5, 4.0))
            near = (min(max(value + chance.uniform(-spread, spread), 0), 100) for value in (compute, memory))
            launches.append((f"k{number}", *(round(value, 2) for value in near)))  # type: ignore[arg-type]
    expected = agreed(launches)
    found = imported(tmp_path, launches)
    assert {name: found[name][0] for name, label in expected.items() if label} == {
        name: label for name, label in expected.items() if label
    }
    assert set(filter(None, expected.values())) == {"memory", "compute", "latency", "balanced"}
    assert sum(label is None for label in expected.values()) > 5  # those are judged by the mean and its interval


@pytest.mark.parametrize(
    ("launches", "bound", "reason"),
    [
        # The interval of the mean reaches below 60 %, but no launch does.
        (
            [(10, 61), (10, 66), (10, 62)],
            "memory",
            "memory 63.0 % of peak (>= 10 points above compute); compute 10.0 %",
        ),
        # All are compute; the mean of the two is neither high nor 10 points ahead.
        (
            [(80, 79.9), (61, 50)],
            "compute",
            "compute 70.5 % of peak in the mean, and the higher in each launch; memory 65.0 %",
        ),
        ([(79, 81), (62, 51), (61, 72)], "undetermined", "memory or compute or balanced"),
        # The larger decides, and of equals compute.
        ([(80, 80)], "compute", "compute 80.0 % of peak (>= 80 %); memory 80.0 %"),
        ([(59.99, 59.99)], "latency", "compute 60.0 %, memory 60.0 % of peak (both < 60 %)"),
        ([(69.99, 60)], "balanced", "compute 70.0 % and memory 60.0 % of peak: less than 10 points apart"),
        ([(70, 60)], "compute", "compute 70.0 % of peak (>= 10 points above memory); memory 60.0 %"),
    ],
)
def test_single_launches_decide(tmp_path: Path, launches: list[tuple[float, float]], bound: str, reason: str) -> None:
    found = imported(tmp_path, [("k", *launch) for launch in launches])["k"]
    assert found[0] == bound
    assert found[1].startswith(reason)


def test_names_and_short_durations_change_nothing(tmp_path: Path) -> None:
    """The recorder's verdicts `communication` and `launch` are not Nsight Compute's."""
    path = tmp_path / "metrics.csv"
    names = ["ncclDevKernel_AllReduce_Sum_f32_RING_LL", "tiny", "ncclDevKernel_Unmeasured"]
    rows = [sol(10, 70, 900), sol(1, 2, 900), sol(1, 2, 900)[2:]]
    path.write_text("\n".join(details([Kernel(i, name, rows[i]) for i, name in enumerate(names)])))
    registry.import_files([path], tmp_path / "run")
    bounds = {name: bound for name, (bound, _) in verdicts(tmp_path / "run").items()}
    assert bounds == dict(zip(names, ["memory", "latency", "communication"], strict=True))


# --- real files -------------------------------------------------------------------------------


def of_csv(path: Path) -> Iterator[Launch]:
    """Each launch of a details page that has both percentages, by the csv module alone."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    header: list[str] = []
    for row in csv.reader(path.read_text(errors="replace").splitlines()):
        if "Kernel Name" in row:
            header = row
        cells = dict(zip(header, row, strict=False))
        label = cells.get("Metric Name", "")
        metric = LABELS.get(label, label)
        if metric in (COMPUTE, MEMORY) and cells["Metric Unit"] == "%":
            launch = found.setdefault((cells["ID"], cells["Kernel Name"]), {})
            launch[metric] = float(cells["Metric Value"].replace(",", ""))
    return ((name, metrics[COMPUTE], metrics[MEMORY]) for (_, name), metrics in found.items() if len(metrics) == 2)


def of_report(path: Path) -> Iterator[Launch]:
    """The same from NVIDIA's library."""
    report = importlib.import_module("ncu_report").load_report(str(path))
    for one in map(report.range_by_idx, range(report.num_ranges())):
        for action in map(one.action_by_idx, range(one.num_actions())):
            if {COMPUTE, MEMORY} <= set(action.metric_names()):
                name = action.name(action.NameBase_DEMANGLED)
                yield name, action[COMPUTE].value(), action[MEMORY].value()


REAL = {  # launches with both percentages
    "ncu-csv/b200_superbench_mixed_stdout.csv": 1,
    "ncu-csv/v100_roofline_gemm.csv": 0,
    "ncu-csv/gb10_na_metric.csv": 0,
    "ncu-rep/h100_rmsnorm.ncu-rep": 3,
    "ncu-rep/short_launches.ncu-rep": 4,
    "ncu-rep/t4_mlp.ncu-rep": 1,
    "ncu-rep/triton_silu_duration_only.ncu-rep": 0,
}


@needs_real_traces
@pytest.mark.parametrize("name", REAL)
def test_real_verdicts_equal_the_rule(name: str, tmp_path: Path) -> None:
    path = REAL_TRACES / name
    if path.suffix == ".ncu-rep" and importlib.util.find_spec("ncu_report") is None:
        pytest.skip("ncu-report is not installed")
    launches = list(of_report(path) if path.suffix == ".ncu-rep" else of_csv(path))
    assert len(launches) == REAL[name]
    registry.import_files([path], tmp_path / "run")
    found = {kernel: bound for kernel, (bound, _) in verdicts(tmp_path / "run").items()}
    expected = agreed(launches)
    assert None not in expected.values()
    measured = {kernel: bound for kernel, bound in found.items() if kernel in expected}
    assert measured == expected
    assert {bound for kernel, bound in found.items() if kernel not in expected} <= {"undetermined"}
