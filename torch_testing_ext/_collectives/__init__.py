"""The rules by which the collectives of all ranks are compared. Pure: records in, findings out."""
