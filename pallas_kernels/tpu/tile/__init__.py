"""One tile of a TPU kernel: logits, masks, rotation, and how a kernel is launched."""
