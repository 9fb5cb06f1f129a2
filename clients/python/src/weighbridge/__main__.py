"""``python -m weighbridge``: the same as the ``weighbridge`` command."""

from weighbridge.cli import main

if __name__ == "__main__":
    main()
