"""Finding or building an environment's executable: archives by URL, Unity projects, folders."""
