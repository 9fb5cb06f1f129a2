"""Where decisions are kept: a small interface, SQLite behind it, and a store in memory for tests."""

from weighbridge_ledger.store.interface import Observation, PutObservation, Store, StoreError, StoreRefusedError
from weighbridge_ledger.store.memory import MemoryStore
from weighbridge_ledger.store.sqlite import SqliteStore

__all__ = [
    "MemoryStore",
    "Observation",
    "PutObservation",
    "SqliteStore",
    "Store",
    "StoreError",
    "StoreRefusedError",
]
