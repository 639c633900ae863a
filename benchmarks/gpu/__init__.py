"""What `make gpu` runs on a machine with a GPU, in stages that can be run one by one."""
