"""Which devices may not be loaded now: temperature, slow-downs, rest after a panic.

Pure decisions: readings and the time are handed in, nothing is read or waited for here.

- `device`: readings of a device → its state, with hysteresis.
- `gate`: states → what is held, by the places that the book knows.
- `panics`: a report of a kernel panic → what is held until loads may start again.

The book makes claims wait for what is held; it also sees to it that loads start one at a time where the platform needs
that, because it knows who is loading.
"""
