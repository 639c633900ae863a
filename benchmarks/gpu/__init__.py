"""Checks and measurements of `make gpu`, in stages that can be run one by one."""
