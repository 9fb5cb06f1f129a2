"""What an operator does with the database beside the ledger: back it up, check it, see what a start would do."""
