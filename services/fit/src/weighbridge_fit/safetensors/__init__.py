"""safetensors: an 8-byte little-endian length, a JSON header of that length, then the tensors without gap or
overlap."""
