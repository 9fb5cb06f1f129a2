"""weighbridge client library."""
