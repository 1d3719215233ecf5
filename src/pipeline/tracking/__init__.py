"""Where numbers go: console, CSV, TensorBoard and MLflow."""
