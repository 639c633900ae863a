"""SGLang from outside its processes: starting and querying it, pools behind routers, and rollouts."""
