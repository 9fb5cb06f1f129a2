"""The ``weighbridge`` command, also as ``python -m weighbridge``."""

from weighbridge import interrupts


def main() -> None:
    """Run the command."""
    interrupts.end_the_process()
    from weighbridge.cli import main as command  # takes a second: not before a Ctrl-C is taken care of

    command()


if __name__ == "__main__":
    main()
