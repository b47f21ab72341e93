"""What a browser is shown: the page to try the model, the pages of the API, the icon."""
