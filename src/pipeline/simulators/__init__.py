"""Built-in simulators, bridges to third-party environments, and packing them as executables."""
