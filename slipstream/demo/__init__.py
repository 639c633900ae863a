"""`slipstream demo`: traffic, report and plot of the loop on one machine."""
