"""The paged-attention engine."""

from engine.threads import spin_briefly

spin_briefly()
