"""weighbridge fit."""
