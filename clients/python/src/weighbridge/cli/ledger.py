"""`capacity`, `leases` and `limit`: what the machine can hold, what holds it, and what the person allows."""

from collections.abc import Sequence

import click
from weighbridge_proto.ledger.v1 import ledger_service_pb2
from weighbridge_proto.memory.v1 import machine_pb2

from weighbridge.cli.arguments import AUTOMATIC, LimitParam, json_option, machine_option
from weighbridge.cli.lease_table import SHORT_ID, print_leases
from weighbridge.cli.output import console, print_json
from weighbridge.cli.running import open_suite, run_command
from weighbridge.cli.tables import print_capacity, print_limit
from weighbridge.client import Suite


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


@click.command(short_help="Free the bytes of a lease whose processes are gone, on your word.")
@click.argument("lease")
@click.option("--yes", is_flag=True, help="Do not ask again.")
@json_option
def free(lease: str, yes: bool, json_output: bool) -> None:
    """Free the bytes of LEASE (its id, or the beginning of it), whose processes are gone.

    A holder that fell silent keeps its bytes until every process of it has ended, because it may still use them. On its
    own machine the ledger sees that by itself. Of a holder on another machine or in another container it cannot: this
    is your word for it. It is refused while the ledger sees one of the processes alive.
    """

    async def body() -> None:
        async with open_suite() as suite:
            lease_id = _the_one(lease, [one.lease_id for one in (await suite.leases()).leases])
            if not yes:
                click.confirm(f"Have all processes of the lease {lease_id[:SHORT_ID]} ended?", abort=True, err=True)
            response = await suite.free(lease_id)
        if json_output:
            print_json(response)
        else:
            console().print(f"{lease_id[:SHORT_ID]} is released. Its bytes are free.")

    run_command("free", body, json_output=json_output)


def _the_one(beginning: str, lease_ids: Sequence[str]) -> str:
    """The lease that is meant.

    Raises:
        UsageError: none, or several.
    """
    meant = [lease_id for lease_id in lease_ids if beginning and lease_id.startswith(beginning)]
    if beginning in meant:
        return beginning
    if len(meant) != 1:
        text = f"{len(meant)} leases begin" if meant else "no lease begins"
        raise click.UsageError(f"{text} with {beginning!r}. weighbridge leases shows them.")
    return meant[0]


@click.command(short_help="How much memory models may use: show it, or set it.")
@click.argument("size", type=LimitParam(), required=False)
@click.option(
    "--spill/--no-spill",
    "spill",
    default=None,
    help="Whether a model may take host memory for what does not fit on a card beside others. Slower; not allowed "
    "unless you say so.",
)
@json_option
def limit(size: int | str | None, spill: bool | None, json_output: bool) -> None:
    """How much memory models may use in all: SIZE, such as 24GiB, or auto. Without SIZE, show it.

    It counts at once, survives restarts, and evicts nobody.
    """

    async def body() -> None:
        async with open_suite() as suite:
            response: ledger_service_pb2.GetCapacityResponse | ledger_service_pb2.SetLimitResponse
            if size is None and spill is None:
                response = await suite.capacity()
            else:
                response = await suite.set_limit(await _wished(suite, size), spill)
        if json_output:
            print_json(response)
        else:
            print_limit(console(), response.capacity, asked=size if isinstance(size, int) else None)

    run_command("limit", body, json_output=json_output)


async def _wished(suite: Suite, size: int | str | None) -> int | None:
    """The limit to ask for; without a size the one that is set, which asking for something else must not take away."""
    if size is not None:
        return None if size == AUTOMATIC else int(size)
    total = (await suite.capacity()).capacity.total
    return total.limit_bytes if total.HasField("limit_bytes") else None
