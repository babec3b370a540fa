"""A net that tells all routes of a token at once, from the text alone."""
