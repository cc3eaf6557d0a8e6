"""What a topic holds twice, out of order or not at all."""
