"""Starts, watches and stops the model-server shards and the router; knows them only by command line."""
