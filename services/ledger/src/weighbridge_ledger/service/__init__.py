"""The ledger as a gRPC service: one owner of the book, a writer thread for the store, streams around them."""
