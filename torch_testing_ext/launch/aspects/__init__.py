"""What one may ask of a test in ranks: one module for each."""
