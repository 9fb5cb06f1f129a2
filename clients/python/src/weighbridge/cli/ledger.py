"""`capacity` and `leases`: what the machine can hold, and what holds it."""

import click
from weighbridge_proto.memory.v1 import machine_pb2

from weighbridge.cli.arguments import json_option, machine_option
from weighbridge.cli.output import console, print_json
from weighbridge.cli.running import open_suite, run_command
from weighbridge.cli.tables import print_capacity, print_leases


@click.command()
@machine_option
@json_option
def capacity(machine: machine_pb2.Machine | None, json_output: bool) -> None:
    """What the machine can hold, what is committed, what is free."""

    async def body() -> None:
        async with open_suite() as suite:
            response = await suite.capacity(machine)
        if json_output:
            print_json(response)
        else:
            print_capacity(console(), response.capacity)

    run_command("capacity", body, json_output=json_output)


@click.command()
@click.option("--all", "include_released", is_flag=True, help="Also leases that have ended and are still remembered.")
@json_option
def leases(include_released: bool, json_output: bool) -> None:
    """Who holds memory, and who waits for it."""

    async def body() -> None:
        async with open_suite() as suite:
            response = await suite.leases(include_released=include_released)
        if json_output:
            print_json(response)
        else:
            print_leases(console(), response.leases)

    run_command("leases", body, json_output=json_output)
