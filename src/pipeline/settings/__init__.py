"""What a user may write: trainer configurations and params.yaml, read with precise errors."""
