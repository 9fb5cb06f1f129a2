"""torch checkpoints: a zip archive with a pickle of the object's structure and one stored record per storage.

Nothing in a checkpoint is ever executed: the pickle is interpreted by a machine that knows a few opcodes and a few
names and has no way to import or call anything. Every other object in the file stays an inert value.
"""
