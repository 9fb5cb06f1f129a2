"""Laws: one formula each, from sizes to bytes. Exact where the runtime is deterministic, sourced where it is
measured."""
