"""`launcher bench`: a load generator for any server that speaks TGI's API or OpenAI's.

Knows nothing of our own server beyond its URL, so that it can hold us against whatever else answers there.
"""
