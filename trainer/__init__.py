"""What learns: reads traces, trains the draft, gates and publishes it. A process of its own."""
