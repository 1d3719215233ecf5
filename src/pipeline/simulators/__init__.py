"""Be an environment: built-in simulators and the loop that makes them executables."""
