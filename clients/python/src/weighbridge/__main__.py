"""The ``weighbridge`` command, also as ``python -m weighbridge``."""

import os

from weighbridge import interrupts


def main() -> None:
    """Run the command."""
    interrupts.end_the_process()
    # gRPC's own notices (a server said goodbye) go to standard error, among the lines for people.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # These take a second to load: not before a Ctrl-C is taken care of.
    from weighbridge.cli import main as command
    from weighbridge.cli.output import prepare_streams

    prepare_streams()
    command()


if __name__ == "__main__":
    main()
