"""Models that reveal mistakes: each has something that a careless wrapper handles wrongly."""
