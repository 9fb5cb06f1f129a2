"""Getting a model: checked first, resumed after any interruption, verified before it counts, its record written last.

The modules from the inside out: `addresses` (where a request may go and what it may carry), `wanted` (what is to be
had, and where on disk), `http` (one request), `transfer` (one file), `hub` (the files of a repository), `folder` (the
model's folder: lock, room, record), `pulling` (all of it in order).
"""
