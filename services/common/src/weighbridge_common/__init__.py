"""weighbridge common."""
