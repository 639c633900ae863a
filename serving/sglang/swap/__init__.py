"""New draft weights into SGLang's running draft, and the version of its target."""
