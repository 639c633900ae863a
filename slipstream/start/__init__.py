"""Assemble the services, start their processes, and end them."""
