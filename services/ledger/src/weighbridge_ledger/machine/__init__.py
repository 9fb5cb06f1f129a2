"""What the machine is and what it can hold: readings → machine → ceilings → capacity.

The rules (`interpret` with `drm`, `devices`, `cgroups` and `sensors`; `ceilings`, `drift`, `external`, `capacity`) are
pure functions over frozen dataclasses. The probes (`probe_linux`, `probe_drm`, `probe_darwin`, `probe_nvml`) collect
raw readings and never raise; `probe.MachineProbe` runs them at most once a second, in a thread, under a timeout.
`footprint` and `fdinfo` measure what processes hold.

How a servicer goes through it:

    probe = await open_probe(settings.machine, node_id=settings.node_id)
    ceilings = ceilings_for(probe.machine, limit_bytes, allow_spill)          # what the book admits beneath
    live = await probe.live()
    external = external_use(probe.machine, live, host_leases, device_leases)  # E of every place, for people
    counted = for_book(over_reserve(probe.machine, automatic_ceilings(probe.machine), external))  # for the book
    record = assemble(probe.machine, live=live, external=external, findings=probe.findings, ...)
    response = capacity_to_proto(record, epoch=epoch, revision=revision)
"""
