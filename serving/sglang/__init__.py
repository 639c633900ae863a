"""SGLang as the engine: the plugin that runs inside its scheduler, and what starts and asks it from outside."""
