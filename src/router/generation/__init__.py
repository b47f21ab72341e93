"""From a request to a running generation: permits, validation, results collected."""
