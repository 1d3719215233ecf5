"""One function per stage of the DAG."""
