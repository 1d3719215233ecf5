"""The stages of the DAG, one module each; `shared` has the code that they share."""
