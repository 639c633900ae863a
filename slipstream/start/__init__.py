"""What assembles the services, starts their processes, and ends them."""
