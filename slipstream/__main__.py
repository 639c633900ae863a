"""`python -m slipstream`."""

from slipstream.cli import main

main()
