"""The pages for browsers: playground, API, icon."""
