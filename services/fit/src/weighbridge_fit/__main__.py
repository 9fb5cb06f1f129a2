"""``python -m weighbridge_fit``: fit as a process."""

from weighbridge_common.server import run_service
from weighbridge_common.settings import load

from weighbridge_fit.service import build
from weighbridge_fit.settings import FitSettings


def main() -> None:
    """Run until a signal."""
    run_service(load(FitSettings), "fit", build)


if __name__ == "__main__":
    main()
