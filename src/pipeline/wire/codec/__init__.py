"""Messages as bytes, and the arrays that they hold."""
