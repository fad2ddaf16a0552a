"""The rates per SM and clock must give the peaks that NVIDIA's datasheets state."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from nanalyze.recorder import peaks
from nanalyze.rundir.schema import DEVICES

# Product, compute capability, SMs, clock in MHz, peaks in TFLOPS (or TOPS) as the datasheet gives
# them, dense. H100 states two clocks: the tensor pipe at 1830 MHz and everything else at 1980.
DATASHEETS = [
    ("P100 SXM2", (6, 0), 56, 1480, {"fp64": 5.3, "fp32": 10.6, "fp16": 21.2}),
    ("V100 SXM2", (7, 0), 80, 1530, {"fp64": 7.8, "fp32": 15.7, "fp16": 31.4, "tensor_fp16": 125}),
    ("T4", (7, 5), 40, 1590, {"fp32": 8.1, "tensor_fp16": 65, "tensor_int8": 130}),
    (
        "A100 SXM4",
        (8, 0),
        108,
        1410,
        {
            "fp64": 9.7,
            "fp32": 19.5,
            "fp16": 78,
            "tensor_fp64": 19.5,
            "tensor_tf32": 156,
            "tensor_fp16": 312,
            "tensor_int8": 624,
        },
    ),
    ("A40", (8, 6), 84, 1740, {"fp32": 37.4, "tensor_tf32": 74.8, "tensor_fp16": 149.7, "tensor_int8": 299.3}),
    ("Jetson AGX Orin", (8, 7), 16, 1300, {"fp32": 5.3, "tensor_int8": 85}),
    (
        "L40S",
        (8, 9),
        142,
        2520,
        {"fp32": 91.6, "tensor_tf32": 183, "tensor_fp16": 362, "tensor_fp8": 733, "tensor_int8": 733},
    ),
    ("H100 SXM", (9, 0), 132, 1980, {"fp64": 33.5, "fp32": 66.9, "fp16": 133.8, "tensor_fp64": 66.9}),
    (
        "H100 SXM, tensor clock",
        (9, 0),
        132,
        1830,
        {"tensor_tf32": 494.7, "tensor_fp16": 989.4, "tensor_fp8": 1978.9, "tensor_int8": 1978.9},
    ),
    ("B200 SXM", (10, 0), 148, 1965, {"fp64": 37, "fp32": 75, "tensor_fp64": 37}),
    (
        "B200 SXM, tensor clock",
        (10, 0),
        148,
        1860,
        {"tensor_tf32": 1125, "tensor_fp16": 2250, "tensor_fp8": 4500, "tensor_int8": 4500},
    ),
    ("RTX 5090", (12, 0), 170, 2407, {"fp32": 104.8, "fp16": 104.8, "tensor_fp8": 838, "tensor_int8": 838}),
]


def rate(capability: tuple[int, int], pipe: str) -> float | None:
    unit = "ops" if pipe == "tensor_int8" else "flops"
    value: float | None = getattr(peaks.rates(*capability), f"{pipe}_{unit}_per_sm_cycle")
    return value


@pytest.mark.parametrize(
    ("capability", "sms", "mhz", "pipe", "stated"),
    [
        pytest.param(capability, sms, mhz, pipe, stated, id=f"{product}-{pipe}")
        for product, capability, sms, mhz, stated_peaks in DATASHEETS
        for pipe, stated in stated_peaks.items()
    ],
)
def test_rate_gives_the_peak_of_the_datasheet(
    capability: tuple[int, int], sms: int, mhz: float, pipe: str, stated: float
) -> None:
    per_cycle = rate(capability, pipe)
    assert per_cycle is not None
    assert per_cycle * sms * mhz * 1e6 / 1e12 == pytest.approx(stated, rel=0.03)


def test_unknown_architecture_has_no_rates() -> None:
    assert set(astuple(peaks.rates(99, 0))) == {None}


@pytest.mark.parametrize(
    ("capability", "pipe"),
    [
        ((7, 0), "tensor_tf32"),
        ((8, 0), "tensor_fp8"),
        ((8, 6), "tensor_fp64"),
        ((10, 0), "fp16"),
        ((10, 3), "tensor_int8"),
    ],
)
def test_what_is_absent_or_has_no_source_is_none(capability: tuple[int, int], pipe: str) -> None:
    assert rate(capability, pipe) is None


def test_every_row_names_its_source_and_has_some_positive_rate() -> None:
    assert len(peaks.table()) == 14
    for capability, row in peaks.table().items():
        assert row.source, capability
        assert row.architecture, capability
        numbers = [value for name in peaks.NUMBER_FIELDS if (value := getattr(row, name)) is not None]
        assert numbers, capability
        assert min(numbers) > 0, capability


def test_rates_carry_the_column_names_of_the_devices_table() -> None:
    assert [name for name in DEVICES.column_names if name.endswith("_per_sm_cycle")] == list(peaks.NUMBER_FIELDS)
