"""Watching: from the start of the ranks until all that is known of their end is collected."""
