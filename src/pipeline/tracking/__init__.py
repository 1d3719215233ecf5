"""Recording of a run: console, CSV, TensorBoard, MLflow and other sinks."""
