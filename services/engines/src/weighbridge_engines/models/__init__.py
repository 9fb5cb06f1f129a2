"""Makers of the models that demos and tests use: made from installed packages, never committed or fetched."""
