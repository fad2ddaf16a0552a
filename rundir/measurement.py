"""What `recorder.measure` and those who read its runs agree on: names of ranges, and how counters are combined."""

ATTRIBUTE = "measure"  # of those ranges; no parameter of a configuration may have this name
WARM_UP = "measure: set-up and warm-up"  # the range of work that is launched for no measurement
COLLECTED = "measure: collected"  # the empty range that holds what was collected after a call
COMBINATIONS = ("sum", "mean", "max", "min")  # of the launches in a call
