"""Files of images from URLs that clients give: only hosts that are allowed are reached."""
