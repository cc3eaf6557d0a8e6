"""A broker of one's own, whose log is a file."""
