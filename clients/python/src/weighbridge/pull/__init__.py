"""Getting a model: checked first, resumed after any interruption, verified before it counts, its record written last.

The modules from the inside out: `addresses` (where a request may go and what it may carry), `wanted` (what is to be
had, and where on disk), `part` (what has come of a file), `watchdog` and `http` (one request, and the end of it),
`transfer` (one file), `hub` (the files of a repository), `folder` (the model's folder: lock, room, record), `pulling`
(all of it in order). Neither the services nor the command's display are known here.
"""
