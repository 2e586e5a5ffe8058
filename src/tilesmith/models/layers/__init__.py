"""A rule, or what it needs, for each kind of layer but attention."""
