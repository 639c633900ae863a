"""Programs of users, that use Slipstream as they would."""
