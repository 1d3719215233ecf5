"""What the `report` stage reads and writes."""
