"""New draft versions into a running engine: follower, installer, trial, circuit breaker and canary."""
