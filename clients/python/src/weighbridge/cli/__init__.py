"""The `weighbridge` command. One module for each group of commands.

What the commands share is in running, output and arguments.
"""

import click

from weighbridge.cli import (
    accuracy,
    chat,
    demo,
    doctor,
    engine,
    fit,
    fits,
    image,
    ledger,
    ledger_tools,
    pin,
    pull,
    top,
    up,
    watch,
)
from weighbridge.version import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="weighbridge")
def main() -> None:
    """Will this AI model run on this machine, how, and may it load now?

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 refused (it won't run here, or was not admitted), 4 a service does
    not answer.
    """


for _command in (
    up.up,
    fit.facts,
    fit.fit,
    fits.fits,
    pin.pin,
    pull.pull_command,
    ledger.capacity,
    ledger.leases,
    ledger.limit,
    ledger.free,
    watch.watch,
    top.top,
    accuracy.accuracy,
    ledger_tools.ledger,
    engine.load,
    engine.unload,
    engine.ps,
    chat.chat,
    image.image,
    doctor.doctor,
    demo.demo,
):
    main.add_command(_command)
