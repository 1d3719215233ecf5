"""The learning algorithms, one readable file each."""
