"""weighbridge engines."""
