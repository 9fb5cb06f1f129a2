"""Plans: one module per engine family turns facts and a workload into lines of memory and a launch."""
