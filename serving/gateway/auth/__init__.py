"""Who may call what: access rules, API keys, and how much each key may ask for."""
