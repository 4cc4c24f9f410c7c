"""`swa-jax adapt`, the way from any model to one that is served with windows, and `swa-jax demo`, a tour of it."""
