"""Everything that passes through Redis: the trace stream and its accounts, erasures, rewards, and the control plane."""
