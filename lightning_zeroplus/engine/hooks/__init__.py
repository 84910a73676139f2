"""The hooks of parameters: upstream's, ours and those of users."""
