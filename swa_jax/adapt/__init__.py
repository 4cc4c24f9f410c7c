"""`swa-jax adapt`, the way from any model to one that is served with windows, and its preset `swa-jax demo`."""
