"""Where reader jobs keep their output and their positions."""
