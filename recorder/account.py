"""What a recording says of itself at its end, in `events`: what was lost, left out, and what it cost."""

from __future__ import annotations

from nanalyze.recorder.exact import Tally
from nanalyze.recorder.samples import SamplesLayer
from nanalyze.recorder.settings import Settings
from nanalyze.recorder.timeline import Timeline
from nanalyze.recorder.writer import Writer

BUDGET_NOTED_AFTER_S = 30.0  # starting and ending take more than their share of a shorter recording


def of_timeline(writer: Writer, timeline: Timeline) -> None:
    """Records that were odd, dropped or late, and rows that the disk did not take."""
    if timeline.odd:
        text = "records with an end before their start; they have no times"
        writer.event("timeline", "odd_record", text, timeline.odd)
    lost = (
        ("records dropped by CUPTI, in all", timeline.dropped),
        ("launches whose time was lost: the recorder could not keep up", timeline.clock.lost),
        ("times CUPTI found no free buffer: the recorder could not keep up", timeline.refused_buffers),
        ("bytes of activity buffers that could not be decoded", timeline.lost_bytes),
    )
    for text, count in lost:
        if count:
            writer.event("timeline", "loss", text, count)
    for table, count in writer.lost.items():
        writer.event("recorder", "loss", f"rows of {table} dropped because the disk did not take them", count)


def of_samples(writer: Writer, layer: SamplesLayer) -> None:
    """Samples received of those expected, by device, and overflows of the hardware buffer."""
    for ordinal, (expected, received) in layer.losses.items():
        text = f"samples received of about {expected} expected on device {ordinal}"
        writer.event("samples", "note", text, received)
    if layer.overflows:
        writer.event("samples", "loss", "times the hardware buffer overflowed: samples are missing", layer.overflows)


def of_exact(writer: Writer, tally: Tally) -> None:
    """Launches measured, and why others were not."""
    note = writer.event
    note("exact", "note", f"launches measured, taking {tally.spent_ns / 1e9:.3f} s in all", tally.measured)
    if tally.over_budget:
        note("exact", "note", "due launches left unmeasured: the budget was spent", tally.over_budget)
    if tally.discarded:
        note("exact", "loss", "measurements discarded: another thread launched at the same time", tally.discarded)
    if tally.unfinished_graphs:
        note("exact", "loss", "graphs that were not launched often enough for all passes", tally.unfinished_graphs)
    if tally.skipped["communication"]:
        text = "kernel shapes not measured because they are collectives"
        note("exact", "note", text, tally.skipped["communication"])


def of_cost(writer: Writer, settings: Settings, cpu_ns: int, elapsed_ns: int) -> None:
    """Where the budget was not kept: the timeline cannot do with less than it needs."""
    used_pct = 100 * cpu_ns / max(elapsed_ns, 1)
    if elapsed_ns > BUDGET_NOTED_AFTER_S * 1e9 and used_pct > 1.1 * settings.cpu_budget_pct:
        text = (
            f"the recorder took {used_pct:.2g} % of a core, more than the {settings.cpu_budget_pct:g} % "
            f"that overhead_pct={settings.overhead_pct:g} allows: "
            "decoding the timeline costs by the launch and only sampling can be made to take less"
        )
        writer.event("recorder", "note", text)
