"""Get or build the executable of an environment: archives by URL, Unity projects, players."""
