"""SGLang as the engine: the plugin inside its scheduler, and the code that starts and queries SGLang from outside."""
