"""The codec: messages as bytes, and the arrays of steps and actions in them."""
