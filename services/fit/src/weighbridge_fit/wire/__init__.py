"""Between the core's plain values and the contract's messages. No rule lives here."""
