"""An experiment file says what to compare; here it becomes configurations, all checked before the first replay."""
