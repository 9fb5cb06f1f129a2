"""weighbridge ledger."""
