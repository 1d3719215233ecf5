"""What a run keeps to continue from, and how it is taken up again."""
