"""What the machine is and what it can hold: readings → machine → ceilings → capacity.

The rules (`interpret`, `ceilings`, `external`, `capacity`) are pure functions over frozen dataclasses. The probes
(`probe_linux`, `probe_darwin`, `probe_nvml`) collect raw readings and never raise; `probe.MachineProbe` runs them at
most once a second, in a thread, under a timeout.
"""
