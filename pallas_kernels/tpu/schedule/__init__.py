"""The scheduled TPU kernels: any pattern, by pairs of blocks."""
