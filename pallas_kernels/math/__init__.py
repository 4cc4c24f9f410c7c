"""What attention computes, without a kernel: the spec, schedules, parts that add up, the oracle."""
