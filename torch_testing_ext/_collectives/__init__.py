"""The collectives that ranks have issued, how they are recorded, and the rules that compare them."""
