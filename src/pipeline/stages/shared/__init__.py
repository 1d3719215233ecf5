"""Code that the stages share: attempts at jobs, processes, inputs and records."""
