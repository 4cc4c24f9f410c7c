"""Measurements of the attention kernels: simulated cycles without hardware, and times on the machine's own device."""
