"""Where numbers go: console, TensorBoard, MLflow, CSV."""
