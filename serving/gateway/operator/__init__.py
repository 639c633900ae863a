"""Endpoints for whoever has the admin key: draft versions, and a target that moves."""
