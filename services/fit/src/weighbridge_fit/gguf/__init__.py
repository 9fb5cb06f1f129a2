"""GGUF: counts, typed key-value pairs, tensor descriptions, then aligned tensor data (versions 2 and 3,
little-endian)."""
