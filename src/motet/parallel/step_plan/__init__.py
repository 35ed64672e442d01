"""What each rank communicates in a step, as a value that is checked, counted, timed and drawn."""
