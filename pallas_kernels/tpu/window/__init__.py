"""The window TPU kernels: the whole window of a block of queries in one step."""
