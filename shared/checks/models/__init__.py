"""Models that show mistakes: each has something that a careless wrapper handles wrongly."""
