"""From the stream to an example: reads traces, admits or refuses them, keeps them on disk, and forgets them."""
