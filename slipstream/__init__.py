"""The command line of Slipstream; it wires the services together and nothing imports it."""
