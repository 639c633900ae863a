"""New draft versions into a running engine: follower, circuit breaker and canary."""
