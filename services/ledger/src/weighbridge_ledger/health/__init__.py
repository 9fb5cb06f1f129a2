"""May a model be loaded on this device now? Temperature, slow-downs, starts one at a time, rest after a panic.

Pure decisions: readings, what is loading and the time are handed in, nothing is read or waited for here.

- `device`: readings of a device → its state, with hysteresis.
- `gate`: states → may a load start (off, observe, guard).
- `panics`: reports of kernel panics → may a load start yet.
- `starts`: loads that are under way → may another one start.

Whether a load starts is the book's business, which does not ask yet. Until it does, the capacity's notes show the
states.
"""
