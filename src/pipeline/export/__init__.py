"""Writing, checking and running policies in ONNX."""
