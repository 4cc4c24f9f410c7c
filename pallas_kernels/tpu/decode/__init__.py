"""Decoding on TPUs over caches where they lie."""
