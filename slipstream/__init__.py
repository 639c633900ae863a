"""The command line of Slipstream: starts and connects the services. No other package imports it."""
