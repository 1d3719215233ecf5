"""Reading results and writing the report, for the stage `report` and `pipeline compare`."""
