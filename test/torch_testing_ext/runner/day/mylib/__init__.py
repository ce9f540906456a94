"""What the tests of this project test."""
