"""OpenAI's Batch API: files of requests that are answered when the server has time, and outlive it."""
