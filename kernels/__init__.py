"""Attention over pages: a plan (no torch), a float32 oracle, a torch backend and a Triton backend."""
