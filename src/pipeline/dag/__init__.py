"""The DAG: its stages, their attempts and records, the two engines, and the report."""
