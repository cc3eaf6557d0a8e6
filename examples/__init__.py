"""What the interfaces are used for, in programs that one can read in one go."""
