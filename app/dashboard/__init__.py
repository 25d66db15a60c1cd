"""The memory dashboard: its feed, its page, its recordings."""
