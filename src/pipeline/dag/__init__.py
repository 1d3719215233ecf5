"""The DAG: its stages, attempts to run a stage, the engines (DVC and Snakemake), the report."""
