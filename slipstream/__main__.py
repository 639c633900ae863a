"""The command `slipstream`, and `python -m slipstream`."""

import sys


def main() -> None:
    """Run this process's command line. Ctrl-C ends it without a traceback while the modules are imported, too."""
    try:
        from slipstream.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
