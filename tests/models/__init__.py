"""Models that others wrote, as they are."""
