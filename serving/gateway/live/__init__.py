"""What the gateway shows: the page, its figures, status, metrics, and the log of requests."""
