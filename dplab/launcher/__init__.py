"""A run as processes and a directory: started in the background, watched, stopped, attached to."""
