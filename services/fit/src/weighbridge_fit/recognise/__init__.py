"""Whose tensors these are: architectures, components and roles, told by names and shapes alone."""
