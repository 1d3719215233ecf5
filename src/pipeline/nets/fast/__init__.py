"""What makes small networks fast: docs/explanation/fast-networks.md says how it is proven."""
