"""Write, check and run policies in ONNX."""
