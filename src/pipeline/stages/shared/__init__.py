"""What the stages share: the attempt at a job, its process, its inputs and its records."""
