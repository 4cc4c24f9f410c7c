"""Which launches a call is on a TPU, and how they are run."""
